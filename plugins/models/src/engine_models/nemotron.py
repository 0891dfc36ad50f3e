"""Nemotron-4 (NVIDIA 2024): squared ReLU, and layer norms whose weight is stored less 1."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module, Param
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import MLP, DecoderModel, PreNormLayer, self_attention
from engine_models.nemotron_card import Nemotron


class OffsetLayerNorm(LayerNorm):
    """A layer norm whose weight is stored less 1."""

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it; add 1 to a weight."""
        super().load(param, tensor.double() + 1 if param.key == "weight" else tensor)


class NemotronModel(DecoderModel):
    """NemotronForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Nemotron.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "norm_eps")
        bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            up, down = f"{name}.mlp.up_proj", f"{name}.mlp.down_proj"
            return PreNormLayer(
                context,
                OffsetLayerNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias),
                OffsetLayerNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                MLP(context, size, inner, up, down, Nemotron.act(config), mlp_bias),
            )

        super().__init__(context, layer, OffsetLayerNorm(context, size, eps, "model.norm"), tied(config, False))
