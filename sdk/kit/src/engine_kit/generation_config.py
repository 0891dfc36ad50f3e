"""generation_config.json: what of it applies, and what the settings put in its place. The launcher asks `with_defaults`
(entry-point group `engine_parts`).

The keys that count, and what the settings mean, are vLLM's (`--generation-config`, `--override-generation-config`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.embedding import EngineConfig
from engine.plugin.hints import did_you_mean
from engine.types.errors import ConfigError, InvalidRequestError
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.params import SamplingDefaults, SamplingParams

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "engine"
KEYS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The keys that count, by the names that `SamplingParams` has for them. Above all `do_sample` does not, as in vLLM: a
request that wants the likeliest tokens says temperature 0."""


def with_defaults(config: EngineConfig, files: CheckpointFiles, model: ModelDescription) -> ModelDescription:
    """The model with the ends of sequence that the file states, where it states some, and the defaults of requests.

    Raises ConfigError as the functions below.
    """
    file = read_generation_config(config, files)
    if model.encoder is not None:
        own = model.encoder.decoder_prompt
        first = _token_ids(files.generation_config.get("decoder_start_token_id"))[:1] or own[:1]
        prompt = (*first, *(_token_ids(files.generation_config.get("forced_bos_token_id"))[:1] or own[1:]))
        encoder = msgspec.structs.replace(model.encoder, decoder_prompt=prompt)
        words = files.generation_config.get(
            "bad_words_ids"
        )  # of the model's own padding; older ones are in config.json
        stated = model.config if words is None else {**model.config, "bad_words_ids": words}
        model = msgspec.structs.replace(model, encoder=encoder, config=stated)
    ends = _token_ids(file.get("eos_token_id")) or _token_ids(files.generation_config.get("eos_token_id"))
    return msgspec.structs.replace(
        model,
        eos_token_ids=ends or model.eos_token_ids,
        sampling=sampling_defaults(config, file, model.generates),
    )


def _token_ids(value: object) -> tuple[int, ...]:
    """A token id or a list of them."""
    if isinstance(value, (list, tuple)):
        return tuple(token for token in value if isinstance(token, int))
    return (value,) if isinstance(value, int) else ()


def as_text(defaults: SamplingDefaults) -> str:
    """Such as "temperature 0.6, top_k 20, by the model's generation_config.json"; "" where all is neutral."""
    if not defaults.params:
        return ""
    told = ", ".join(f"{name} {value}" for name, value in defaults.params.items())
    most = defaults.max_tokens_limit
    limit = "" if most is None else f"; no request gets more than {most} tokens"
    return f"{told}, by {defaults.source}{limit}"


def read_generation_config(config: EngineConfig, files: CheckpointFiles) -> dict[str, Any]:
    """The file that the settings name: the model's own, or that of another folder.

    Raises ConfigError where that folder has none, or one that is broken.
    """
    asked = config.generation_config
    if asked in (AUTO, NEUTRAL):
        return files.generation_config
    path = Path(asked) / FILE
    if asked == "vllm" and not path.exists():
        raise ConfigError(
            "generation_config=vllm", "that is vLLM's name for its own defaults", f"pass {NEUTRAL} for this engine's"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"generation_config={asked}",
            f"{path}: {error.strerror or error}",
            f"name a folder with a {FILE}, or pass {AUTO} for the model's own, {NEUTRAL} for neutral defaults",
        ) from error
    except ValueError as error:
        raise ConfigError(f"generation_config={asked}", f"{path} is no JSON: {error}", "mend the file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"generation_config={asked}", f"{path} holds no JSON object", "mend the file")
    return found


def sampling_defaults(config: EngineConfig, file: Mapping[str, Any], generates: bool) -> SamplingDefaults:
    """The defaults of requests: those of the file (`read_generation_config`), and over them the override.

    `max_new_tokens` is the `max_tokens` of requests that name none. Where the operator gives it, with a folder or the
    override, it is a limit of all requests too, as in vLLM.

    Args:
        generates: the model writes text; one that does not takes no override.

    Raises ConfigError for a key that the override cannot have, and for a value that is out of range.
    """
    override: dict[str, Any] = json.loads(config.override_generation_config or "{}")
    if override and not generates:
        raise ConfigError(
            f"override_generation_config={json.dumps(override)}", "this engine writes no text", "leave it out"
        )
    for key in override:
        if key not in KEYS:
            raise ConfigError(
                f"override_generation_config with the key {key!r}",
                "no default of requests has that name",
                did_you_mean(key, KEYS) or f"it can set {', '.join(KEYS)}",
            )
    if not generates:
        return SamplingDefaults()
    stated = {} if config.generation_config == NEUTRAL else {key: file[key] for key in KEYS if key in file}
    neutral, params = SamplingParams(), {}
    for key, value in (stated | override).items():
        if value is None:
            continue
        name, taken = KEYS[key], _taken(config, key, value, overridden=key in override)
        if name == "max_tokens" or taken != getattr(neutral, name):
            params[name] = taken
    by_operator = override if config.generation_config in (AUTO, NEUTRAL) else stated | override
    limit: int | None = by_operator.get("max_new_tokens")
    return SamplingDefaults(params=params, max_tokens_limit=limit, source=_source(config, params, override))


def _taken(config: EngineConfig, key: str, value: object, *, overridden: bool) -> int | float:
    """The value as `SamplingParams` takes it (a top_k of -1 as 0)."""
    try:
        given: dict[str, Any] = {KEYS[key]: value}
        (params := SamplingParams(**given)).verify()
        taken: int | float = getattr(params, KEYS[key])
        return taken
    except InvalidRequestError as error:
        asked, remedy = f"override_generation_config with {key}", error.remedy
        if not overridden:
            asked = f"{FILE if config.generation_config == AUTO else f'{config.generation_config}/{FILE}'}: {key}"
            remedy = f"set {key} with --override-generation-config, or pass --generation-config engine"
        raise ConfigError(f"{asked}={value!r:.80}", error.found, remedy) from error


def _source(config: EngineConfig, params: Mapping[str, Any], override: Mapping[str, Any]) -> str:
    names = {name for key, name in KEYS.items() if key in override}
    told = []
    if set(params) - names:
        told.append(f"the model's {FILE}" if config.generation_config == AUTO else f"{config.generation_config}/{FILE}")
    if set(params) & names:
        told.append("--override-generation-config")
    return " and ".join(told)
