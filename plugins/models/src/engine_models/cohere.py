"""Command R (Cohere 2024) and Command R7B (2025): parallel blocks, norms without bias, neighbouring pairs."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.cohere_card import Cohere, Cohere2
from engine_models.decoder_card import DecoderCard, tied
from engine_models.layers import DecoderModel, ParallelLayer, self_attention


class CohereModel(DecoderModel):
    """CohereForCausalLM."""

    card: type[DecoderCard] = Cohere

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_eps")
        bias, rope = flag(config, "attention_bias", False), read_rope(config, model.kv_specs[0].head_size)
        rotary = make_rotary(context, rope)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            placed = self.placed(model.kv_specs[index].sliding_window)
            attention = self_attention(
                context,
                index,
                rotary if placed else None,
                f"{name}.self_attn",
                interleaved=rope.rotary_dim if placed else 0,
                qkv_bias=bias,
                o_bias=bias,
            )
            norm = LayerNorm(context, size, eps, f"{name}.input_layernorm", bias=False)
            return ParallelLayer(context, norm, attention, GatedMLP(context, size, inner, f"{name}.mlp"))

        norm = LayerNorm(context, size, eps, "model.norm", bias=False)
        super().__init__(context, layer, norm, tied(config, True))
        self._scale = number(config, "logit_scale")

    @staticmethod
    def placed(window: int | None) -> bool:
        """Whether a layer with this window has rotary positions."""
        return True

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size], times `logit_scale`."""
        return self.context.ops.scale(super().logits(hidden), self._scale)


class Cohere2Model(CohereModel):
    """Cohere2ForCausalLM."""

    card = Cohere2

    @staticmethod
    def placed(window: int | None) -> bool:
        """Those with a window."""
        return window is not None
