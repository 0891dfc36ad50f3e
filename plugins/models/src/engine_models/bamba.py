"""Bamba (2024): Llama's layers, most of them with Mamba-2's mixer in place of attention."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, head_dim, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.bamba_card import Bamba
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel, Mixing, PreNormLayer, self_attention
from engine_states.layers import Mamba2Mixer


class BambaModel(DecoderModel):
    """BambaForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Bamba.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
        rotary = make_rotary(context, read_rope(config, head_dim(config)))
        form, mixes = Bamba.mixer(config), Bamba.mixes(config)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            if mixes[index]:
                mixing: Mixing = Mamba2Mixer(context, index, form, f"{name}.mamba")
            else:
                mixing = self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias)
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                mixing,
                RMSNorm(context, size, eps, f"{name}.pre_ff_layernorm"),
                GatedMLP(context, size, inner, f"{name}.feed_forward", mlp_bias),
            )

        norm = RMSNorm(context, size, eps, "model.final_layernorm")
        super().__init__(context, layer, norm, tied(config, False))
