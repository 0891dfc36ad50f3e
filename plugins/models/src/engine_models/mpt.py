"""MPT (MosaicML 2023): ALiBi, no biases at all."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import integer, number
from engine_models.alibi import mpt_slopes, on_this_rank
from engine_models.decoder_card import tied
from engine_models.layers import MLP, DecoderModel, PreNormLayer, self_attention
from engine_models.mpt_card import Mpt


class MptModel(DecoderModel):
    """MptForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Mpt.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_epsilon")
        attention = config["attn_config"]
        scale = number(attention, "softmax_scale", model.kv_specs[0].head_size ** -0.5)
        slopes = on_this_rank(context, mpt_slopes(model.num_q_heads, number(attention, "alibi_bias_max", 8)))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"transformer.blocks.{index}"
            return PreNormLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.norm_1", bias=False),
                self_attention(
                    context,
                    index,
                    None,
                    f"{name}.attn",
                    parts=("Wqkv",),
                    out="out_proj",
                    scale=scale,
                    alibi_slopes=slopes,
                ),
                LayerNorm(context, size, eps, f"{name}.norm_2", bias=False),
                MLP(context, size, inner, f"{name}.ffn.up_proj", f"{name}.ffn.down_proj", "gelu", bias=False),
            )

        embed = Embedding(context, model.vocab_size, size, "transformer.wte")
        norm = LayerNorm(context, size, eps, "transformer.norm_f", bias=False)
        super().__init__(context, layer, norm, tied(config, True), embed)
