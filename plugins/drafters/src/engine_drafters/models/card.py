"""The cards of draft heads. Their configs are those that `engine_drafters.layouts` makes of published ones."""

from __future__ import annotations

from typing import Any

from engine.interfaces.model import ModelCard, ModelFeature, ModelNeed
from engine.interfaces.platform import STREAM
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine_drafters.layouts import TENSORS
from engine_kit.model_config import (
    describe_decoder,
    integer,
    read_rope,
    stored_dtype,
    unsupported_ranks,
    unsupported_rope,
)

_SILU = ("silu", "swish")


class _Head(ModelCard):
    """What they have in common. No stage of a pipeline has a part of one; they join features to embeddings, or add
    blocks, in plain torch, alike in every step."""

    framework = "torch"
    captured_by = STREAM

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """They are whole, on every stage."""
        return super().unsupported_features() | {"stages"}


class _Eagle(_Head):
    quantized = frozenset({"linear", "head"})

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """One decoder layer; raises as `ModelCard.describe` says."""
        return describe_decoder(config)

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config, reasons = need.config, []
        if config.get("hidden_act", "silu") not in _SILU:
            reasons.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
        try:
            reasons += unsupported_rope(config) or cls._unsupported_parts(config, need.parallel.tp)
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        model = cls.describe(config)
        reasons = unsupported_ranks(model, tp, intermediate_size=integer(config, "intermediate_size"))
        if model.num_layers != 1:
            reasons.append(f"it has {model.num_layers} layers, and the body has one")
        head_size = model.kv_specs[0].head_size
        if (rotated := read_rope(config, head_size).rotary_dim) != head_size:
            reasons.append(f"{rotated} of {head_size} elements would be rotated, the body rotates whole heads")
        if "sliding_attention" in (config.get("layer_types") or ()):
            reasons.append("its layer sees a window of tokens (layer_types), and the body's sees all")
        return reasons


class LlamaEagle(_Eagle):
    """LlamaForCausalLMEagle: EAGLE and EAGLE-2 (Li et al. 2024), one Llama layer over token and feature."""

    body = "engine_drafters.models.eagle:EagleModel"

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        reasons = super()._unsupported_parts(config, tp)
        return [*reasons, "its layernorms are not served (layernorms)"] if config.get("layernorms") else reasons


class LlamaEagle3(_Eagle):
    """LlamaForCausalLMEagle3: EAGLE-3 (Li et al. 2025), one layer over token and the streams of several layers."""

    body = "engine_drafters.models.eagle:Eagle3Model"

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        reasons = super()._unsupported_parts(config, tp)
        vocab_size = integer(config, "vocab_size")
        drafted = integer(config, "draft_vocab_size", vocab_size)
        if drafted > vocab_size:
            reasons.append(f"draft_vocab_size is {drafted}, more than the vocabulary of {vocab_size}")
        if drafted < vocab_size and "d2t" not in config.get(TENSORS, ()):
            reasons.append(f"its {drafted} tokens are not mapped to the vocabulary of {vocab_size}: there is no d2t")
        if drafted < vocab_size and "lm_head.weight" not in config.get(TENSORS, ()):
            reasons.append(f"it has no lm_head for its {drafted} tokens")
        if drafted < tp:
            reasons.append(f"a draft vocabulary of {drafted} is smaller than {tp} ranks")
        return reasons


class Medusa(_Head):
    """MedusaModel (Cai et al. 2024): some heads over the target's last hidden state. It has no layers, and no cache.

    Its published config says neither `vocab_size` nor `hidden_size`: drafter `medusa` adds the target's.
    """

    body = "engine_drafters.models.medusa:MedusaModel"
    batch_invariant = False  # silu is torch's

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        integer(config, "medusa_num_heads")
        integer(config, "medusa_num_layers", 1, low=0)
        return ModelDescription(
            architecture="MedusaModel",
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            num_layers=0,
            num_q_heads=0,
            max_model_len=integer(config, "max_position_embeddings", 1 << 30),
            kv_specs=(),
            config=dict(config),
        )

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """Sizes that make no sense."""
        try:
            cls.describe(need.config)
        except EngineError as error:
            return [str(error)]
        return []
