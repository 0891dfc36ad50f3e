"""SmolLM3 (Hugging Face 2025): Llama's form, in which some layers have no positions (NoPE, Yang et al. 2025)."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel, PreNormLayer, self_attention
from engine_models.smollm3_card import SmolLM3


class SmolLM3Model(DecoderModel):
    """SmolLM3ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, SmolLM3.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps", 1e-6)
        bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
        rotary, rotated = make_rotary(context, read_rope(config, model.kv_specs[0].head_size)), SmolLM3.rotated(config)

        def layer(context: ModelContext, index: int) -> Module:
            name, turned = f"model.layers.{index}", rotary if rotated[index] else None
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, turned, f"{name}.self_attn", qkv_bias=bias, o_bias=bias),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp", mlp_bias),
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, True))
