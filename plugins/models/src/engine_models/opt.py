"""OPT (Zhang et al. 2022): learned positions, biases everywhere, ReLU."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer
from engine_models.decoder_card import tied
from engine_models.layers import MLP, DecoderModel, PlacedEmbedding, PreNormLayer, self_attention
from engine_models.opt_card import OPT

_EPS = 1e-5
_FIRST = 2
"""The row of the first position: fairseq kept those before it for padding."""


class OPTModel(DecoderModel):
    """OPTForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, OPT.filled(context.description.config)
        size, inner, bias = model.hidden_size, integer(config, "intermediate_size"), flag(config, "enable_bias", True)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.decoder.layers.{index}"
            return PreNormLayer(
                context,
                LayerNorm(context, size, _EPS, f"{name}.self_attn_layer_norm"),
                self_attention(context, index, None, f"{name}.self_attn", out="out_proj", qkv_bias=bias, o_bias=bias),
                LayerNorm(context, size, _EPS, f"{name}.final_layer_norm"),
                MLP(context, size, inner, f"{name}.fc1", f"{name}.fc2", OPT.act(config), bias),
            )

        positions, tables = integer(config, "max_position_embeddings"), "model.decoder.embed_"
        embed = PlacedEmbedding(context, size, f"{tables}tokens", positions, f"{tables}positions", _FIRST)
        norm = LayerNorm(context, size, _EPS, "model.decoder.final_layer_norm")
        super().__init__(context, layer, norm, tied(config, True), embed)
