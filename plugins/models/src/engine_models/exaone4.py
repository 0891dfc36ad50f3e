"""EXAONE 4 (LG AI Research 2025): norms behind the blocks and of each head, layers without positions."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.exaone4_card import Exaone4
from engine_models.layers import DecoderModel, PostNormLayer, self_attention


class Exaone4Model(DecoderModel):
    """Exaone4ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Exaone4.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        head_size, mixed = model.kv_specs[0].head_size, config["sliding_window"] is not None
        rotary = make_rotary(context, read_rope(config, head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = f"{name}.self_attn"
            norms = tuple(RMSNorm(context, head_size, eps, f"{attention}.{part}_norm") for part in "qk")
            turned = None if mixed and model.kv_specs[index].sliding_window is None else rotary
            return PostNormLayer(
                context,
                self_attention(context, index, turned, attention, norms=norms),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp"),
                RMSNorm(context, size, eps, f"{name}.post_feedforward_layernorm"),
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))
