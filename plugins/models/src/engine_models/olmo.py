"""OLMo-2 (Ai2 2024) and OLMo-3 (2025): blocks read the residual as it is, and what they give is normed."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel, PostNormLayer, ProjectionRMSNorm, self_attention
from engine_models.olmo_card import Olmo2, Olmo3


class Olmo2Model(DecoderModel):
    """Olmo2ForCausalLM."""

    card: type[Olmo2] = Olmo2

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        spec, bias = model.kv_specs[0], flag(config, "attention_bias", False)
        ropes = [make_rotary(context, read_rope(rope, spec.head_size)) for rope in self.card.ropes(config)]

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention, head_size = f"{name}.self_attn", spec.head_size
            norms = (
                ProjectionRMSNorm(context, model.num_q_heads, head_size, eps, f"{attention}.q_norm"),
                ProjectionRMSNorm(context, spec.num_kv_heads, head_size, eps, f"{attention}.k_norm", shared=True),
            )
            rotary = ropes[0] if model.kv_specs[index].sliding_window is None else ropes[-1]
            return PostNormLayer(
                context,
                self_attention(context, index, rotary, attention, qkv_bias=bias, o_bias=bias, norms=norms),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp"),
                RMSNorm(context, size, eps, f"{name}.post_feedforward_layernorm"),
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))


class Olmo3Model(Olmo2Model):
    """Olmo3ForCausalLM."""

    card = Olmo3
