"""Facts from config.json, for model cards: read, checked, and in one form. Torch-free.

Reads what transformers 4 and 5 write (`torch_dtype` and `dtype`, `rope_scaling` and `rope_parameters`,
`use_sliding_window` with `max_window_layers` and `layer_types`). A key that is missing or makes no sense is a
CheckpointError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.modeling.rope_config import read_rope, scaled_length
from engine.types.errors import CheckpointError
from engine.types.model import KVSpec, ModelDescription

Config = Mapping[str, Any]

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What weights may be stored in."""


def bad_key(config: Config, key: str, found: str, remedy: str = "correct the model's config.json") -> CheckpointError:
    """The error for a key of config.json."""
    return CheckpointError(f"read {key!r} of the {architecture(config)} config", found, remedy)


def architecture(config: Config) -> str:
    """The first architecture string. Raises CheckpointError where there is none."""
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            "read 'architectures' of config.json",
            f"it is {names!r} (model_type is {config.get('model_type')!r})",
            'config.json must name the model\'s class, as in ["LlamaForCausalLM"]',
        )
    return names[0]


def integer(config: Config, key: str, default: int | None = None, low: int = 1) -> int:
    """A whole number of at least `low`; `default` where the key is missing or null. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise bad_key(config, key, "the key is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise bad_key(config, key, f"it is {value!r}, not a whole number of at least {low}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A positive finite number; `default` where the key is missing or null. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise bad_key(config, key, "the key is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < float("inf"):
        raise bad_key(config, key, f"it is {value!r}, not a positive number")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    """true or false; `default` where the key is missing or null. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_key(config, key, f"it is {value!r}, not true or false")
    return value


def head_dim(config: Config, default: int | None = None) -> int:
    """Elements of one attention head: `head_dim`, else `default`, else hidden_size / num_attention_heads."""
    if config.get("head_dim") is not None or default is not None:
        return integer(config, "head_dim", default)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if hidden % heads:
        raise bad_key(config, "hidden_size", f"{hidden} is no multiple of num_attention_heads = {heads}")
    return hidden // heads


def kv_heads(config: Config) -> int:
    """Key and value heads; as many as query heads where the config is silent. Raises CheckpointError."""
    heads = integer(config, "num_attention_heads")
    groups = integer(config, "num_key_value_heads", heads)
    if heads % groups:
        raise bad_key(config, "num_key_value_heads", f"{groups} does not divide num_attention_heads = {heads}")
    return groups


def layer_windows(config: Config, default_window: int | None = None) -> tuple[int | None, ...]:
    """Each layer's sliding window (None: full attention), as Qwen2 and Qwen3 choose it.

    `layer_types` decides where it is given; otherwise `use_sliding_window` makes every layer from
    `max_window_layers` on a sliding one.

    Args:
        default_window: of a config that has no `sliding_window` key at all.
    """
    layers = integer(config, "num_hidden_layers")
    window: int | None = None
    if flag(config, "use_sliding_window", False) and config.get("sliding_window", default_window) is not None:
        window = integer(config, "sliding_window", default_window)
    types = config.get("layer_types")
    if types is None:
        first = integer(config, "max_window_layers", 28, low=0)
        return tuple(window if index >= first else None for index in range(layers))
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise bad_key(config, "layer_types", f"it does not name a type for each of the {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise bad_key(config, "layer_types", f"{kind!r} is neither 'full_attention' nor 'sliding_attention'")
    if window is None and "sliding_attention" in types:
        raise bad_key(
            config,
            "layer_types",
            "it asks for sliding attention, but the config has no sliding_window with use_sliding_window",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def kv_specs(config: Config, windows: tuple[int | None, ...], head_size: int) -> tuple[KVSpec, ...]:
    """One cache specification a layer, from each layer's window."""
    heads = kv_heads(config)
    return tuple(
        KVSpec(
            kind="full" if window is None else "sliding",
            num_kv_heads=heads,
            head_size=head_size,
            sliding_window=window,
        )
        for window in windows
    )


def stored_dtype(config: Config) -> str:
    """The weights' dtype as the config names it; "float32" where it is silent. Raises CheckpointError."""
    name = config.get("dtype", config.get("torch_dtype"))
    if name is None:
        return "float32"
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise bad_key(config, "dtype", f"it is {name!r}", f"the dtypes served are {', '.join(DTYPES)}")
    return short


def token_ids(config: Config, key: str) -> tuple[int, ...]:
    """A token id, a list of them, or null, as a tuple. Raises CheckpointError."""
    value = config.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise bad_key(config, key, f"{token!r} is no token id")
    return ids


def describe_decoder(
    config: Config,
    *,
    windows: tuple[int | None, ...] | None = None,
    default_head_dim: int | None = None,
) -> ModelDescription:
    """The description of a plain decoder with rotary positions.

    Args:
        config: config.json, decoded.
        windows: each layer's sliding window; None: all layers see everything.
        default_head_dim: the architecture's, where config.json is silent.

    Raises:
        CheckpointError: naming the key that is missing or makes no sense.
        UnsupportedModelError: for rotary scaling of an unknown kind.
    """
    layers = integer(config, "num_hidden_layers")
    head_size = head_dim(config, default_head_dim)
    rope = read_rope(config, head_size)
    bos = token_ids(config, "bos_token_id")
    return ModelDescription(
        architecture=architecture(config),
        dtype=stored_dtype(config),
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        num_layers=layers,
        num_q_heads=integer(config, "num_attention_heads"),
        max_model_len=scaled_length(rope),
        kv_specs=kv_specs(config, windows if windows is not None else (None,) * layers, head_size),
        eos_token_ids=token_ids(config, "eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        config=dict(config),
    )
