"""Granite 3 (IBM 2024): embeddings, scores, what blocks give, and logits are multiplied by numbers of the config."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.granite_card import GraniteMoe
from engine_models.layers import Block, DecoderModel, PreNormLayer, ScaledEmbedding, self_attention


class GraniteModel(DecoderModel):
    """GraniteForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, context.description.config
        size, eps = model.hidden_size, number(config, "rms_norm_eps", 1e-6)
        bias = flag(config, "attention_bias", False)
        scale, added = number(config, "attention_multiplier", 1.0), number(config, "residual_multiplier", 1.0)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias, scale=scale),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                self.block(context, name),
                added,
            )

        factor = number(config, "embedding_multiplier", 1.0)
        embed = ScaledEmbedding(context, model.vocab_size, size, "model.embed_tokens", factor)
        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False), embed)
        self._scaling = number(config, "logits_scaling", 1.0)
        self._scaled = embed.scaled

    @staticmethod
    def block(context: ModelContext, name: str) -> Block:
        """The feed-forward block of the layer of this name."""
        size, config = context.description.hidden_size, context.description.config
        inner, bias = integer(config, "intermediate_size"), flag(config, "mlp_bias", False)
        return GatedMLP(context, size, inner, f"{name}.mlp", bias)

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The vectors, multiplied as embeddings are."""
        return self._scaled(vectors)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], divided by `logits_scaling`."""
        return self.context.ops.scale(super().logits(hidden), 1.0 / self._scaling)


class GraniteMoeModel(GraniteModel):
    """GraniteMoeForCausalLM."""

    @staticmethod
    def block(context: ModelContext, name: str) -> Block:
        """Routed experts."""
        config, parts = GraniteMoe.filled(context.description.config), ("input_linear", "output_linear")
        name = f"{name}.block_sparse_moe"
        return routed_experts(context, GraniteMoe, config, name, router="router.layer", parts=parts, stacked="rows")
