"""The small config.json of a suite: made by transformers' own config class of the architecture, where there is one."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from engine.types.errors import ConfigError
from engine_sdk.conformance.model.example import SMALL

PARTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_local_experts": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "ffn_dim": 48,
        "ffn_hidden_size": 48,
    }
)
"""Sizes that some architectures have beside `SMALL`, and that mean another model where they have them not."""
_KEPT = frozenset({"architectures", "model_type", "bos_token_id", "eos_token_id", "num_labels"})
"""Keys of which no other values are tried: names, and numbers that the model's body does not compute with."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
"""The same: those that every test of the suite depends on."""
_ELSEWHERE = ("drop", "initializer", "aux_loss", "jitter", "use_cache")
"""Parts of names of keys that say how to train or to generate: nothing is computed by them here."""
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
_ROPES: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_theta": 50.0},
    {"partial_rotary_factor": 0.5},
)


def class_of(architecture: str) -> Any | None:
    """transformers' model class of this name; None where there is none, or no transformers."""
    if importlib.util.find_spec("transformers") is None:
        return None
    found = getattr(importlib.import_module("transformers"), architecture, None)
    return found if getattr(found, "config_class", None) is not None else None


def own_names(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's keys in the architecture's own words: GPT-2 says `n_embd` for "hidden_size"."""
    kind = class_of(architecture)
    names = {} if kind is None else kind.config_class.attribute_map
    return {names.get(key, key): value for key, value in config.items()}


def small_config(architecture: str, over: Mapping[str, Any]) -> dict[str, Any]:
    """A small config.json, without its `architectures`.

    Where transformers has the architecture, with all keys that its config class writes, at that class's own values but
    for sizes and what is near to nothing (the eps of norms). Else `SMALL`.

    Args:
        architecture: the name of transformers' class, or of none.
        over: goes over it.
    """
    kind = class_of(architecture)
    if kind is None:
        return {**SMALL, **over}
    base = importlib.import_module("transformers").PretrainedConfig().to_dict()
    own = {k: v for k, v in kind.config_class().to_dict().items() if k in SMALL or k not in base or k == "model_type"}
    small = {k: v for k, v in own_names(architecture, {**SMALL, **PARTS}).items() if k in own}
    small.pop("tie_word_embeddings", None)
    if "kv_lora_rank" in own:  # latent attention: every head has keys of its own
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    small |= {key: SMALL["rms_norm_eps"] for key, value in own.items() if "eps" in key and isinstance(value, float)}
    if isinstance(own.get("rope_parameters"), dict):
        small["rope_parameters"] = {**own["rope_parameters"], "rope_theta": SMALL["rope_theta"]}
    given = own_names(architecture, over)
    with quiet():
        made = json.loads(kind.config_class(**{**small, **given}).to_json_string(use_diff=False))
    return {**{key: made[key] for key in own if key in made}, "num_labels": SMALL["num_labels"], **given}


def read_config(path: str | Path) -> dict[str, Any]:
    """A config.json. Raises ConfigError where the file is none."""
    asked = f"read the config {path}"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(asked, getattr(error, "strerror", None) or str(error), "name a config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(asked, f"it holds a {type(found).__name__}, not an object", "name a config.json")
    return found


def variants(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, another value) for each key of a config of which transformers' config class takes other values: flags the
    other way, numbers next to theirs, other activations and other rotary positions. One key at a time; whether the
    class takes a value, its author has to try.
    """
    kind = class_of(architecture)
    if kind is None:
        return
    fields = dataclasses.fields(kind.config_class) if dataclasses.is_dataclass(kind.config_class) else ()
    types = {field.name: field.type for field in fields}
    kept = _KEPT | own_names(architecture, dict.fromkeys(_SIZES)).keys()
    for key, value in config.items():
        if key not in kept and not any(part in key for part in _ELSEWHERE):
            yield from ((key, other) for other in _others(value, types.get(key)) if other != value)


def spellings(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is said otherwise, config.json): the same model as other versions of transformers write it down. Version 4
    leaves out what its class takes for granted, and has no `rope_parameters`."""
    kind = class_of(architecture)
    if kind is None:
        return
    taken = kind.config_class().to_dict()
    kept = {*_KEPT, *own_names(architecture, SMALL)} - {"tie_word_embeddings"}
    yield (
        "without the keys that stand at the class's defaults",
        {key: value for key, value in config.items() if key in kept or key not in taken or value != taken[key]},
    )
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        plain = {key: value for key, value in config.items() if key != "rope_parameters"}
        scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling = None if rope.get("rope_type", "default") == "default" else scaled
        yield "rope_theta and rope_scaling", {**plain, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _others(value: Any, declared: Any) -> list[Any]:
    members = [declared, *get_args(declared)]
    literal = next((member for member in members if get_origin(member) is Literal), None)
    if literal is not None:
        return list(get_args(literal))
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1, *([value - 1] if value else [])] if value < 16 else [6]
    if isinstance(value, float):
        return [value * 2 if value else 0.5]
    if isinstance(value, dict) and "rope_theta" in value:
        return [{**value, **rope} for rope in _ROPES]
    if isinstance(value, str):
        known = importlib.import_module("transformers.activations").ACT2FN
        return list(_ACTIVATIONS) if value in known else []
    if value is None:
        return [other for kind, other in ((bool, True), (int, 6), (float, 0.5)) if kind in members][:1]
    return []


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, and without its remarks about configs."""
    logging = importlib.import_module("transformers.utils.logging")
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
