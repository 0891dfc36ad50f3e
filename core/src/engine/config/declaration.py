"""Settings, each declared once, by whoever owns it: name, type, default, help, bounds.

    class ServerSettings(Settings):
        port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=65535)

Flags, variables of the environment and keys of config files are made from a declaration without pydantic;
`engine.config.settings.model_of` makes a validated model of it when an engine starts. `EngineSettings` are the engine's
own. What commands declare stands in the entry-point group `engine_settings`: a config file and the environment may hold
all of them, whatever command is called. Points come beside these, from `engine.plugin.points`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, cast

from engine.plugin.candidate import entry_points

logger = logging.getLogger(__name__)

GROUP = "engine_settings"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "int8")

Type = Literal["text", "integer", "number", "boolean", "bytes"]
_TYPES: Mapping[str, Type] = {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: None where the engine finds it out.
        help: one line.
        name: as a keyword; the flag has dashes, the environment's variable is ENGINE_<NAME>.
        type: of "bytes" are numbers, or "512MiB", "4GB".
        choices: the values that are allowed, where these are few.
        secret: its value is never shown.
        repeatable: its flag may be given several times; in the environment commas stand between the values.
        least, above, most: bounds of a number; of a text `least` characters. `above` itself is not allowed.
        check: is given a value before its type is looked at, and returns it, or another. Raises ValueError.
    """

    default: str | int | float | bool | None
    help: str
    name: str = ""
    type: Type = "text"
    choices: tuple[str, ...] = ()
    secret: bool = False
    repeatable: bool = False
    least: int | None = None
    above: int | None = None
    most: int | None = None
    check: Callable[[Any], Any] | None = None

    @property
    def flag(self) -> str:
        """The flag as typed, e.g. "--max-num-seqs"."""
        return "--" + self.name.replace("_", "-")


def setting(default: str | int | float | bool | None, help: str, **facts: Any) -> Any:
    """A setting as `Settings` declares it; name and, but for bytes, type come from the attribute."""
    return Setting(default, help, **facts)


class Settings:
    """The base of declarations: each attribute that `setting` made is one. `declared` has them by name."""

    declared: ClassVar[Mapping[str, Setting]] = {}

    def __init_subclass__(cls) -> None:
        made: dict[str, Setting] = {}
        for name, annotation in cls.__annotations__.items():
            one: Setting = cls.__dict__[name]
            if not isinstance(annotation, str):  # of a file whose annotations are evaluated
                annotation = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            plain = _TYPES.get(annotation.removesuffix(" | None"), "text")
            made[name] = replace(one, name=name, type="bytes" if one.type == "bytes" else plain)
        cls.declared = made


def _json_object(value: Any) -> str | None:
    """A JSON object as text; a file and Python may have it as a mapping."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
        if given is not None and not isinstance(given, dict):
            raise ValueError('it is no object; send one like {"name": 0.5}')
        return given if given is None else json.dumps(given)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f'it is no JSON ({error}); send an object like {{"name": 0.5}}') from error


def _names(value: Any) -> Any:
    if isinstance(value, str) and not all(name.strip() for name in value.split(",")):
        raise ValueError("one of the names is empty; send a name, or several with commas between")
    return value


def _counts(value: Any) -> Any:
    """Numbers with commas between; a file and Python may have them as a list."""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    if isinstance(value, str) and not all(part.strip().isdecimal() and int(part) for part in value.split(",")):
        raise ValueError("it is no list of numbers; send one of each stage, like 6,10")
    return value


class EngineSettings(Settings):
    """The engine's own, in the order in which they are listed."""

    model: str | None = setting(None, "the model: a folder or a name (default: the installed driver's own)")
    tokenizer: str | None = setting(None, "a folder with the tokenizer's files (default: the model's)")
    chat_template: str | None = setting(
        None, "a file with the chat template, or the template itself (default: the model's own)"
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        """variables for the chat template where a request does not set them, as JSON: '{"enable_thinking": false}'""",
        check=_json_object,
    )
    generation_config: str = setting(
        "auto",
        "sampling defaults of requests: auto (the model's generation_config.json), engine (neutral ones), or a folder",
    )
    override_generation_config: str | None = setting(
        None,
        """sampling defaults in place of those of --generation-config, as JSON: '{"temperature": 0.5}'""",
        check=_json_object,
    )
    served_model_name: str | None = setting(
        None, "the model's name in the API, or several with commas between (default: --model as given)", check=_names
    )
    dtype: str = setting("auto", "type of weights and activations", choices=DTYPES)
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache (default: that of activations); fp8 is fp8_e4m3",
        choices=KV_CACHE_DTYPES,
    )
    runner: str = setting(
        "auto",
        "what the engine is for: to write text, or to embed and classify",
        choices=("auto", "generate", "pooling"),
    )
    max_model_len: int | None = setting(
        None, "most tokens of one request, prompt and output (default: the model's)", least=1
    )
    max_num_seqs: int = setting(256, "most requests that run at once", least=1)
    max_num_batched_tokens: int = setting(
        0, "most tokens that one step computes; 0: as many as suit the device", least=0
    )
    long_prefill_token_threshold: int = setting(0, "most tokens of one prompt in one step; 0: no limit", least=0)
    block_size: int = setting(16, "tokens in one block of the KV cache", least=1)
    tensor_parallel_size: int = setting(1, "ranks among which each layer is divided", least=1)
    pipeline_parallel_size: int = setting(1, "stages, one after the other, among which the layers are divided", least=1)
    pipeline_parallel_split: str | None = setting(
        None, "layers of each stage, with commas between, e.g. 6,10 (default: as even as it goes)", check=_counts
    )
    context_parallel_size: int = setting(1, "ranks among which the tokens of each sequence are divided", least=1)
    enable_expert_parallel: bool = setting(
        False, "deal routed experts whole over the ranks of all engine cores, in place of dividing each of them"
    )
    data_parallel_size: int = setting(1, "engine cores side by side, each with the whole model", least=1)
    data_parallel_size_local: int | None = setting(None, "cores behind this server (default: all)", least=1)
    data_parallel_rank: int | None = setting(None, "this server's one core; other servers have the others", least=0)
    data_parallel_start_rank: int | None = setting(None, "this server's first core (default: 0)", least=0)
    data_parallel_address: str | None = setting(None, "where core 0 listens for other servers' (default: 127.0.0.1)")
    data_parallel_rpc_port: int | None = setting(None, "and its port (default: 29550)", least=1, most=65535)
    data_parallel_token_file: str | None = setting(None, "a file with a secret of all servers whose cores meet there")
    data_parallel_hybrid_lb: bool = setting(False, "several servers, each with --data-parallel-size-local cores")
    data_parallel_external_lb: bool = setting(False, "several servers, each with the core of --data-parallel-rank")
    data_parallel_restarts: int = setting(0, "how often each of several cores is started again when it dies", least=0)
    kv_cache_memory: int | None = setting(
        None, "memory of each rank's KV cache, e.g. 4GiB (default: by a profile)", type="bytes"
    )
    num_kv_pages: int | None = setting(None, "pages of the KV cache; goes before --kv-cache-memory", least=1)
    swap_space: int = setting(
        0, "host memory of each rank for pages of preempted requests, e.g. 4GiB", type="bytes", least=0
    )
    kv_canary: bool = setting(False, "mark pages of the KV cache with what they hold, and check it wherever they move")
    preemption_mode: str = setting(
        "auto",
        "what becomes of a request that loses its pages; auto: swap where there is swap space, else recompute",
        choices=("auto", "recompute", "swap"),
    )
    memory_utilization: float | None = setting(
        None,
        "share of the device's memory to take, weights and all; the KV cache gets the rest (default: platform's)",
        above=0,
        most=1,
    )
    enable_prompt_embeds: bool = setting(False, "let prompts bring embeddings in place of tokens (prompt_embeds)")
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of prompts that begin alike")
    prefix_caching_hash_algo: str = setting(
        "xxhash",
        "hash function that names cached blocks; sha256 where users must not forge each other's",
        choices=("xxhash", "sha256"),
    )
    max_kv_retention: float = setting(
        0.5, "share of the KV cache that requests may retain (0: they may not)", least=0, most=1
    )
    max_kv_retention_per_key: float = setting(
        0.25,
        "share of the KV cache that one API key, or without keys one cache_salt of LLM, may retain",
        least=0,
        most=1,
    )
    batch_invariant: bool = setting(
        False, "take only drivers that compute a row with the same bits alone and in any batch, chunked or not"
    )
    enable_jump_forward: bool = setting(True, "compute what a constraint forces together, as drafts")
    in_flight: int | None = setting(None, "steps under way at once; 1 overlaps nothing (default: stages + 1)", least=1)
    grammar_warm_up: bool = setting(
        False, "load the library of the first grammar, and start its process, before a request needs them"
    )
    step_timeout: float | None = setting(
        None,
        "seconds without a sign of life after which a core in a process of its own is taken for hung and ended "
        "(default: platform's)",
        least=2,
    )
    log_format: str = setting(
        "text",
        "what commands and the processes of the engine log: lines for people, or a JSON object a line",
        choices=("text", "json"),
    )
    profile_dir: str | None = setting(
        None, "folder for profiles that are taken while serving (default: none are taken)"
    )
    seed: int = setting(0, "seed of the requests that bring none of their own")
    plugins: str | None = setting(
        None,
        "the plugins that may be used, by distribution or POINT:DRIVER, with commas; -NAME denies one "
        "(default: all that are installed)",
        repeatable=True,
    )


@cache
def of_commands() -> Mapping[str, type[Settings]]:
    """What installed commands declare, by the name under which a file may have it; backwards by name, so that the
    server comes before the chat, which shares its settings. What cannot be imported is left out, with a warning."""
    found: dict[str, type[Settings]] = {}
    for point in sorted(entry_points(GROUP), key=lambda one: one.name, reverse=True):
        try:
            found[point.name] = cast("type[Settings]", point.load())
        except Exception:
            logger.warning("the settings %s cannot be imported", point.value, exc_info=True)
    return found


@cache
def settings_of_commands() -> Mapping[str, Setting]:
    """The same by name. A setting that several commands have means the same to all of them."""
    found: dict[str, Setting] = {}
    for declared in of_commands().values():
        found |= {name: one for name, one in declared.declared.items() if name not in found}
    return found
