"""StarCoder2 (BigCode 2024): layer norms and plain feed-forward blocks, with biases, around grouped heads."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import MLP, DecoderModel, PreNormLayer, self_attention
from engine_models.starcoder2_card import Starcoder2


class Starcoder2Model(DecoderModel):
    """Starcoder2ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Starcoder2.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "norm_epsilon")
        bias = flag(config, "use_bias", True)
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            up, down = f"{name}.mlp.c_fc", f"{name}.mlp.c_proj"
            return PreNormLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias),
                LayerNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                MLP(context, size, inner, up, down, Starcoder2.act(config), bias),
            )

        super().__init__(context, layer, LayerNorm(context, size, eps, "model.norm"), tied(config, True))
