"""Qwen2-MoE (2024) and Qwen3-MoE (2025): Qwen's decoders, in which most layers have routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.layers import DecoderModel, PreNormLayer, head_norms, self_attention
from engine_models.qwen_moe_card import Qwen2Moe, Qwen3Moe
from engine_moe.layers import GatedBlock


class Qwen3MoeModel(DecoderModel):
    """Qwen3MoeForCausalLM, and what Qwen2MoeForCausalLM has of it."""

    card: type[Qwen3Moe] = Qwen3Moe

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, eps = model.hidden_size, number(config, "rms_norm_eps", 1e-6)
        sparse = self.card.sparse(config)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            if sparse[index]:
                shared = self.shared(context, config, f"{name}.mlp")
                block: Any = routed_experts(context, self.card, config, f"{name}.mlp", shared=shared)
            else:
                block = GatedMLP(context, size, integer(config, "intermediate_size"), f"{name}.mlp")
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", **self.features(context, config, name)),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                block,
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))

    @staticmethod
    def features(context: ModelContext, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Of a layer's attention."""
        bias, eps = flag(config, "attention_bias", False), number(config, "rms_norm_eps", 1e-6)
        return {"qkv_bias": bias, "o_bias": bias, "norms": head_norms(context, f"{name}.self_attn", eps)}

    @staticmethod
    def shared(context: ModelContext, config: Mapping[str, Any], name: str) -> Any:
        """What all tokens use: nothing."""
        return None


class Qwen2MoeModel(Qwen3MoeModel):
    """Qwen2MoeForCausalLM."""

    card = Qwen2Moe

    @staticmethod
    def features(context: ModelContext, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Of a layer's attention."""
        return {"qkv_bias": flag(config, "qkv_bias", True)}

    @staticmethod
    def shared(context: ModelContext, config: Mapping[str, Any], name: str) -> Any:
        """The shared expert, behind its gate."""
        size, inner = context.description.hidden_size, integer(config, "shared_expert_intermediate_size")
        block = GatedMLP(context, size, inner, f"{name}.shared_expert")
        return GatedBlock(context, size, block, f"{name}.shared_expert_gate")
