"""What the cards of decoders have in common: the config with what it leaves out, and why it may not be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from engine.interfaces.model import ModelCard, ModelNeed
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine_kit.model_config import (
    bad_key,
    describe_decoder,
    flag,
    head_dim,
    integer,
    read_rope,
    unsupported_ranks,
    unsupported_rope,
)

SILU: Mapping[str, str] = {"silu": "silu", "swish": "silu"}
GELU: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""A config's activation -> how `GatedMLP` and `MLP` call it."""


class DecoderCard(ModelCard):
    """Base of decoders' cards. The config's keys are transformers' of the architecture.

    Attributes:
        defaults: of the architecture's config class, where they are not what `engine_kit.model_config` takes for
            granted: config.json need not have these keys.
        activation: the key of the activation; `activations`: its values, and what the body's layers call them.
        foreign: keys that change the computation in a way that the body does not have: with the values that do not.
        partial: whether a part of each head may be rotated, instead of whole heads.
        default_head_dim: where config.json is silent; None: hidden_size / num_attention_heads.
    """

    framework = "torch"
    takes_embeds = True
    quantized = frozenset({"linear", "head", "embedding"})
    defaults: ClassVar[Mapping[str, Any]] = {}
    activation: ClassVar[str] = "hidden_act"
    activations: ClassVar[Mapping[str, str]] = SILU
    foreign: ClassVar[Mapping[str, Any]] = {}
    partial: ClassVar[bool] = False
    default_head_dim: ClassVar[int | None] = None

    if TYPE_CHECKING:  # mypy takes a class that nobody may make objects of for a function, without class methods

        def __new__(cls) -> Self: ...

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what it leaves out, and in the words of `describe_decoder` where the architecture has others.

        Raises CheckpointError where a key that has another name is missing or makes no sense.
        """
        return {**cls.defaults, **config}

    @classmethod
    def act(cls, config: Mapping[str, Any]) -> Any:
        """What the body's layers call the config's activation."""
        return cls.activations[config.get(cls.activation, next(iter(cls.activations)))]

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """Each layer's sliding window; None: it sees everything. `config` is filled, as in all that follows."""
        return (None,) * integer(config, "num_hidden_layers")

    @classmethod
    def ropes(cls, config: dict[str, Any]) -> list[dict[str, Any]]:
        """The config for each set of rotary parameters that the model has; the first says how long it may be."""
        return [config]

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        given, config = config, cls.filled(config)
        description = describe_decoder(
            cls.ropes(config)[0], windows=cls.windows(config), default_head_dim=cls.default_head_dim
        )
        return msgspec.structs.replace(description, config=dict(given), **cls.features(config))

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Further attributes of the description."""
        return {}

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        try:
            config = cls.filled(need.config)
        except EngineError as error:
            return [str(error)]
        act = config.get(cls.activation)
        reasons = []
        if act is not None and not (isinstance(act, str) and act in cls.activations):
            reasons.append(f"{cls.activation} {act!r} is none of {', '.join(cls.activations)}")
        for key, neutral in cls.foreign.items():
            if config.get(key, neutral) not in (None, neutral):
                reasons.append(f"the config sets {key} to {config[key]!r}, which the model's body does not have")
        try:
            reasons += [reason for rope in cls.ropes(config) for reason in unsupported_rope(rope)]
            if not reasons:
                reasons += [*cls._unsupported_parts(config, need.parallel.tp), *cls.more_unsupported(config)]
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        model = cls.describe(config)
        reasons = unsupported_ranks(model, tp, intermediate_size=integer(config, "intermediate_size"))
        size = head_dim(config, cls.default_head_dim)
        rotated = {read_rope(rope, size).rotary_dim for rope in cls.ropes(config)}
        if rotated != {size} and not cls.partial:
            reasons.append(f"{min(rotated)} of {size} elements would be rotated, this architecture rotates whole heads")
        return reasons

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Reasons of the one architecture."""
        return []


def windows_by_type(
    config: Mapping[str, Any], pattern: int | None = None, default: int | None = 4096
) -> tuple[int | None, ...]:
    """Each layer's sliding window by `layer_types`; where these are missing, every layer but each `pattern`-th has one.

    Raises CheckpointError where the types make no sense, or the window is missing.
    """
    layers = integer(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None and pattern is not None:
        types = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise bad_key(config, "layer_types", f"it does not name a type for each of the {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise bad_key(config, "layer_types", f"{kind!r} is neither 'full_attention' nor 'sliding_attention'")
    if "sliding_attention" not in types:
        return (None,) * layers
    if config.get("sliding_window", default) is None:
        raise bad_key(config, "sliding_window", "it is null, and layer_types asks for sliding attention")
    window = integer(config, "sliding_window", default)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def tied(config: Mapping[str, Any], default: bool) -> bool:
    """Whether the embedding and the head share a matrix."""
    return flag(config, "tie_word_embeddings", default)
