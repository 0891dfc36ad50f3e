"""What config.json says, for model cards: read, checked, and in one form. Torch-free.

Reads what transformers 4 and 5 write: `torch_dtype` and `dtype`; `use_sliding_window` with `max_window_layers` and
`layer_types`; `rope_theta` beside `rope_scaling: {"type" or "rope_type": ...}` (4), or all of it in `rope_parameters`
(5); where both stand, `rope_scaling` wins, as in transformers 5. A key that is missing or makes no sense is a
CheckpointError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.types.errors import CheckpointError, UnsupportedModelError
from engine.types.model import KVSpec, ModelDescription
from engine.types.pooling import Activation, PoolerConfig, PoolingType

Config = Mapping[str, Any]
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What weights may be stored in."""
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}

DEFAULT_THETA = 10000.0

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""The kinds of scaling that `engine_kit.rotary_table` computes."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one model.

    Args:
        rope_type: one of `ROPE_TYPES`.
        theta: the base of the wavelengths.
        rotary_dim: how many of a head's first elements are rotated; even.
        max_position: `max_position_embeddings`.
        original_max_position: positions before scaling (yarn, llama3, longrope); equals `max_position` where not given.
        factor: by how much the context is stretched; 1.0 for "default".
        attention_factor: cosines and sines are multiplied by it; None: computed from the factor (yarn, longrope).
        mscale, mscale_all_dim: yarn's other way to state the attention factor.
        beta_fast, beta_slow: yarn's ramp, in rotations over the original length.
        truncate: yarn's ramp starts and ends at whole dimensions.
        low_freq_factor, high_freq_factor: llama3's ramp.
        short_factors, long_factors: longrope's, rotary_dim / 2 each: by them wavelengths are stretched, where no more
            than the original length is served, and where more is.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The raw parameters in transformers 5's form: `rope_type`, `rope_theta` and what the type needs.

    Raises CheckpointError where they are not an object.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError("read the rotary parameters of config.json", f"they are {raw!r:.80}, not an object")
    parameters = dict(raw)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    return parameters


def unsupported_rope(config: Mapping[str, Any]) -> list[str]:
    """Why the rotary parameters cannot be served: for a card's `unsupported`. Empty where they can."""
    parameters = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return ["rope_parameters differ by layer type, this model has one set for all layers"]
    if parameters["rope_type"] not in ROPE_TYPES:
        return [f"rope_type {parameters['rope_type']!r} is none of {', '.join(ROPE_TYPES)}"]
    if "mrope_section" in parameters:
        return ["rope_parameters.mrope_section asks for several positions a token, this model has one"]
    return []


def read_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """Read and check the rotary parameters.

    Raises:
        UnsupportedModelError: the kind of scaling is unknown.
        CheckpointError: a parameter is missing or makes no sense.
    """
    reasons = unsupported_rope(config)
    if reasons:
        raise UnsupportedModelError("rotary positions as config.json describes them", "; ".join(reasons))
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]

    def value(key: str, default: float | None = None, source: Mapping[str, Any] = parameters) -> float:
        found = source.get(key)
        if found is None:
            found = default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < float("inf"):
            problem = "it is missing" if found is None else f"it is {found!r}, not a positive number"
            raise CheckpointError(
                f"read {key!r} for rope_type {kind!r}", problem, "correct the rotary parameters in config.json"
            )
        return found

    def optional(key: str) -> float | None:
        return None if parameters.get(key) is None else value(key)

    positions = value("max_position_embeddings", None, config)
    if positions != int(positions):
        found = f"it is {positions!r}, not a whole number"
        raise CheckpointError("read 'max_position_embeddings' of config.json", found, "correct config.json")
    max_position = int(positions)
    rotary_dim = int(head_size * value("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise CheckpointError(
            "read the rotary parameters of config.json",
            f"{rotary_dim} of {head_size} elements of a head would be rotated",
            "the number must be even, positive, and at most the head's size",
        )
    common: dict[str, Any] = {
        "rope_type": kind,
        "theta": value("rope_theta", DEFAULT_THETA),
        "rotary_dim": rotary_dim,
        "max_position": max_position,
        "original_max_position": max_position,
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind in ("linear", "dynamic"):
        return RopeConfig(**common, factor=value("factor"))
    # As in transformers: a number beside the rotary parameters goes before the one in them (Phi3's form).
    own = parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = config.get("original_max_position_embeddings", own)
    common["original_max_position"] = int(value("original_max_position_embeddings", max_position))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                "read the rotary parameters of config.json",
                f"low_freq_factor = {low} is not below high_freq_factor = {high}",
            )
        return RopeConfig(**common, factor=value("factor"), low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        return RopeConfig(
            **common,
            factor=value("factor", max_position / common["original_max_position"]),
            attention_factor=optional("attention_factor"),
            short_factors=_factors(parameters, "short_factor", rotary_dim // 2),
            long_factors=_factors(parameters, "long_factor", rotary_dim // 2),
        )
    return RopeConfig(
        **common,
        factor=value("factor", max_position / common["original_max_position"]),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        # transformers takes 0 for "not given" here, hence `or`.
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=bool(parameters.get("truncate", True)),
    )


def _factors(parameters: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    found = parameters.get(key)
    if not isinstance(found, (list, tuple)) or len(found) != count or not all(_positive(number) for number in found):
        raise CheckpointError(
            f"read {key!r} for rope_type 'longrope'",
            f"it is {found!r:.80}, not {count} positive numbers",
            "correct the rotary parameters in config.json",
        )
    return tuple(float(number) for number in found)


def _positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < float("inf")


def scaled_length(rope: RopeConfig) -> int:
    """The positions that a model serves, scaling counted in.

    "linear" stretches `max_position_embeddings` by the factor and "yarn" the original length (which some configs have
    already done); "llama3" and "longrope" configs state the stretched length; "dynamic" is served up to the original
    length only. As vLLM derives it.
    """
    if rope.rope_type == "linear":
        return int(rope.max_position * rope.factor)
    if rope.rope_type == "yarn":
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position


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


def embedder(config: Config, pooling_type: PoolingType) -> PoolerConfig:
    """The pooler of a model without a classification head. Raises CheckpointError for a key that makes no sense."""
    sizes = config.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise bad_key(config, "matryoshka_dimensions", f"it is {sizes!r}, no list of sizes")
    return PoolerConfig(pooling_type=pooling_type, dimensions=tuple(sizes))


def classifier(config: Config, pooling_type: PoolingType) -> PoolerConfig:
    """The pooler of a ...ForSequenceClassification. Raises CheckpointError for a key that makes no sense."""
    labels = num_labels(config)
    return PoolerConfig(pooling_type=pooling_type, num_labels=labels, activation=_activation(config, labels))


def num_labels(config: Config) -> int:
    """How many labels there are: those of `id2label`, else `num_labels`, else 2, as in transformers; where the head is
    to be made of tokens' logits (`engine_kit.label_tokens`), one for each, or one in all for two that are compared."""
    if tokens := label_tokens(config):
        return 1 if flag(config, "is_original_qwen3_reranker", False) else len(tokens)
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    count: Any = config.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise bad_key(config, "num_labels", f"it is {count!r}, no number of labels")
    return count


def label_tokens(config: Config) -> list[str]:
    """`classifier_from_token`, the tokens whose logits are a classifier's labels; none where it is not given. Raises
    CheckpointError where it makes no sense; `is_original_qwen3_reranker` goes with two alone."""
    tokens = config.get("classifier_from_token") or []
    if not isinstance(tokens, (list, tuple)) or not all(isinstance(token, str) for token in tokens):
        raise bad_key(config, "classifier_from_token", f"it is {tokens!r:.80}, no list of tokens")
    if flag(config, "is_original_qwen3_reranker", False) and len(tokens) != 2:
        found = f"it names {len(tokens)} tokens, and is_original_qwen3_reranker compares two"
        raise bad_key(config, "classifier_from_token", found, 'write both, say ["no", "yes"]')
    return list(tokens)


def _activation(config: Config, labels: int) -> Activation:
    """What sentence-transformers wrote goes first; then `problem_type`; else one label is a sigmoid, several a softmax.

    (vLLM chooses so too.)
    """
    written = config.get("sentence_transformers")
    name = written.get("activation_fn") if isinstance(written, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is not None:
        found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
        if found is None:
            raise bad_key(config, "activation_fn", f"it is {name!r}", f"served are {', '.join(_ACTIVATIONS)}")
        return found
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"


def unsupported_ranks(model: ModelDescription, size: int, **widths: int) -> list[str]:
    """Why `size` ranks cannot share a model made of these layers: for a card's `unsupported`. Empty where they can.

    Args:
        widths: further dimensions that must divide evenly, e.g. intermediate_size=11008.
    """
    if size == 1:
        return []
    reasons = [
        f"{name} {total} does not divide over {size} ranks"
        for name, total in {"num_attention_heads": model.num_q_heads, **widths}.items()
        if total % size
    ]
    for heads in dict.fromkeys(spec.num_kv_heads for spec in model.kv_specs):
        if heads % size and size % heads:
            reasons.append(f"{heads} KV heads can be neither divided over {size} ranks nor copied evenly to them")
    if model.vocab_size < size:
        reasons.append(f"a vocabulary of {model.vocab_size} is smaller than {size} ranks")
    return reasons
