"""GPT-2 (Radford et al. 2019): learned positions, matrices stored turned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number
from engine_models.decoder_card import tied
from engine_models.gpt2_card import GPT2
from engine_models.layers import MLP, DecoderModel, PlacedEmbedding, PreNormLayer, self_attention

_TURNED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Stored [in, out]."""
_MASKS = (".attn.bias", ".attn.masked_bias")
"""Triangles that old files hold."""


class GPT2Model(DecoderModel):
    """GPT2LMHeadModel."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, GPT2.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_epsilon")
        scale = model.kv_specs[0].head_size ** -0.5 if flag(config, "scale_attn_weights", True) else 1.0
        by_layer = flag(config, "scale_attn_by_inverse_layer_idx", False)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"transformer.h.{index}"
            attention = self_attention(
                context,
                index,
                None,
                f"{name}.attn",
                parts=("c_attn",),
                out="c_proj",
                qkv_bias=True,
                o_bias=True,
                scale=scale / (index + 1) if by_layer else scale,
            )
            return PreNormLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.ln_1"),
                attention,
                LayerNorm(context, size, eps, f"{name}.ln_2"),
                MLP(context, size, inner, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", GPT2.act(config)),
            )

        positions = integer(config, "max_position_embeddings")
        embed = PlacedEmbedding(context, size, "transformer.wte", positions, "transformer.wpe")
        norm = LayerNorm(context, size, eps, "transformer.ln_f")
        super().__init__(context, layer, norm, tied(config, True), embed)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; OpenAI's own files have names without the prefix "transformer."."""
        super().load_weights(self._named(weights))

    @staticmethod
    def _named(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
                name = f"transformer.{name}"
            if not name.endswith(_MASKS):
                yield name, tensor.T if name.endswith(_TURNED) and tensor.ndim == 2 else tensor
