"""The cards of DeepSeek's decoders with latent attention, V2 and V3, where no layer has routed experts."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import LATENT_OPERATIONS, MODEL_OPERATIONS
from engine.modeling.config import describe_decoder, flag, integer, kv_heads, read_rope, unsupported_rope
from engine.modeling.parallel import unsupported_ranks
from engine.types.errors import EngineError
from engine.types.model import KVSpec, ModelDescription

_SILU = ("silu", "swish")


class _Deepseek(ModelCard):
    """What the two have in common. Sizes that config.json does not name are transformers' own."""

    framework = "torch"
    operations = frozenset(MODEL_OPERATIONS + LATENT_OPERATIONS)
    quantized = frozenset({"linear", "head"})
    routed_experts: ClassVar[int]
    first_k_dense: ClassVar[int]

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        rope_size = integer(config, "qk_rope_head_dim", 64)
        spec = KVSpec(
            kind="mla",
            num_kv_heads=1,
            head_size=integer(config, "kv_lora_rank", 512) + rope_size,
            rope_size=rope_size,
        )
        plain = describe_decoder({**config, "head_dim": rope_size})  # what is rotated: other heads are not stored
        return msgspec.structs.replace(plain, kv_specs=(spec,) * plain.num_layers, config=dict(config))

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config = need.config
        reasons = []
        if config.get("hidden_act", "silu") not in _SILU:
            reasons.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
        try:
            reasons.extend(cls._experts(config))
            reasons.extend(unsupported_rope(config) or cls._unsupported_parts(config, need.parallel.tp))
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def _experts(cls, config: dict[str, Any]) -> list[str]:
        """A reason where a layer has routed experts. null for `n_routed_experts` is none, as in DeepSeek's own code."""
        experts = config.get("n_routed_experts", config.get("num_local_experts", cls.routed_experts))
        layers = integer(config, "num_hidden_layers")
        first = integer(config, "first_k_dense_replace", cls.first_k_dense, low=0)
        if not experts or first >= layers:
            return []
        return [
            f"mixture of experts is not served yet: layers {first} to {layers - 1} have {experts} routed experts "
            "(first_k_dense_replace, n_routed_experts)"
        ]

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        model = cls.describe(config)
        rope_size = model.kv_specs[0].rope_size
        rotated = read_rope(config, rope_size).rotary_dim
        inner = integer(config, "intermediate_size")
        reasons = unsupported_ranks(model, tp, intermediate_size=inner)
        if rotated != rope_size:
            reasons.append(f"{rotated} of qk_rope_head_dim = {rope_size} elements would be rotated, not all of them")
        if kv_heads(config) != model.num_q_heads:
            reasons.append(
                f"num_key_value_heads is {config['num_key_value_heads']}, but every one of {model.num_q_heads} heads "
                "has keys and values of its own"
            )
        if config.get("q_lora_rank", 1536) is not None:
            integer(config, "q_lora_rank", 1536)
        for key in ("qk_nope_head_dim", "v_head_dim"):
            integer(config, key, 128)
        for key in ("attention_bias", "mlp_bias", "rope_interleave", "tie_word_embeddings"):
            flag(config, key, False)
        return reasons


class DeepseekV2(_Deepseek):
    """DeepseekV2ForCausalLM with dense layers alone: latent attention, rotary pairs that are neighbours."""

    body = "engine_reference.models.deepseek:DeepseekV2Model"
    routed_experts, first_k_dense = 64, 0


class DeepseekV3(_Deepseek):
    """DeepseekV3ForCausalLM with dense layers alone: latent attention, rotary pairs as `rope_interleave` says."""

    body = "engine_reference.models.deepseek:DeepseekV3Model"
    routed_experts, first_k_dense = 256, 3
