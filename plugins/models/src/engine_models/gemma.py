"""Gemma 1, 2 and 3 (Gemma Team 2024, 2024, 2025): scaled embeddings, weights of norms stored less 1, gated gelu.

Gemma 2 norms what each block gives too, and caps scores and logits; Gemma 3 norms queries and keys instead of capping.
"""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.gemma_card import Gemma, Gemma2, Gemma3
from engine_models.layers import (
    DecoderModel,
    OffsetRMSNorm,
    PreNormLayer,
    SandwichLayer,
    ScaledEmbedding,
    self_attention,
)


class GemmaModel(DecoderModel):
    """GemmaForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Gemma.filled(context.description.config)
        size, inner = model.hidden_size, integer(config, "intermediate_size")
        eps, bias = number(config, "rms_norm_eps", 1e-6), flag(config, "attention_bias", False)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            return PreNormLayer(
                context,
                OffsetRMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias),
                OffsetRMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp", act=Gemma.act(config)),
            )

        norm = OffsetRMSNorm(context, size, eps, "model.norm")
        embed = ScaledEmbedding(context, model.vocab_size, size, "model.embed_tokens", size**0.5)
        super().__init__(context, layer, norm, tied(config, True), embed)


class Gemma2Model(DecoderModel):
    """Gemma2ForCausalLM, and what Gemma3ForCausalLM has of it."""

    card: type[Gemma2] = Gemma2
    qk_norms = False

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, inner = model.hidden_size, integer(config, "intermediate_size")
        eps, bias = number(config, "rms_norm_eps", 1e-6), flag(config, "attention_bias", False)
        scale = number(config, "query_pre_attn_scalar") ** -0.5
        head_size = model.kv_specs[0].head_size
        ropes = [make_rotary(context, read_rope(rope, head_size)) for rope in self.card.ropes(config)]

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"

            def norm(part: str, size: int = size) -> OffsetRMSNorm:
                return OffsetRMSNorm(context, size, eps, f"{name}.{part}")

            more = {"qkv_bias": bias, "o_bias": bias, "scale": scale}
            if self.qk_norms:
                more["norms"] = norm("self_attn.q_norm", head_size), norm("self_attn.k_norm", head_size)
            rotary = ropes[0] if model.kv_specs[index].sliding_window is None else ropes[-1]
            return SandwichLayer(
                context,
                norm("input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", **more),
                norm("post_attention_layernorm"),
                norm("pre_feedforward_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp", act=self.card.act(config)),
                norm("post_feedforward_layernorm"),
            )

        norm = OffsetRMSNorm(context, size, eps, "model.norm")
        embed = ScaledEmbedding(context, model.vocab_size, size, "model.embed_tokens", size**0.5)
        super().__init__(context, layer, norm, tied(config, True), embed)
        capped = config["final_logit_softcapping"] is not None
        self._cap = number(config, "final_logit_softcapping") if capped else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], capped."""
        logits = super().logits(hidden)
        return logits if self._cap is None else self.context.ops.soft_cap(logits, self._cap)


class Gemma3Model(Gemma2Model):
    """Gemma3ForCausalLM."""

    card = Gemma3
    qk_norms = True
