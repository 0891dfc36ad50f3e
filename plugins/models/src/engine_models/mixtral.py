"""Mixtral (Mistral AI 2024) and OLMoE (Ai2 2024): Llama's form, in which every layer has routed experts."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import Attention, Module, RMSNorm, Rotary
from engine_kit.model_config import number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.experts_card import ExpertsCard
from engine_models.layers import DecoderModel, PreNormLayer, ProjectionRMSNorm, self_attention
from engine_models.mixtral_card import Mixtral, Olmoe


class MixtralModel(DecoderModel):
    """MixtralForCausalLM, and what OlmoeForCausalLM has of it."""

    card: type[ExpertsCard] = Mixtral
    block: str = "block_sparse_moe"
    projections: tuple[str, ...] = ("w1", "w3", "w2")

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, eps = model.hidden_size, number(config, "rms_norm_eps")
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            norms = [RMSNorm(context, size, eps, f"{name}.{one}_layernorm") for one in ("input", "post_attention")]
            attention = self.attention(context, index, rotary, f"{name}.self_attn", eps)
            experts = routed_experts(context, self.card, config, f"{name}.{self.block}", parts=self.projections)
            return PreNormLayer(context, norms[0], attention, norms[1], experts)

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))

    @staticmethod
    def attention(context: ModelContext, index: int, rotary: Rotary, name: str, eps: float) -> Attention:
        """A layer's."""
        return self_attention(context, index, rotary, name)


class OlmoeModel(MixtralModel):
    """OlmoeForCausalLM."""

    card = Olmoe
    block = "mlp"
    projections = ("gate_proj", "up_proj", "down_proj")

    @staticmethod
    def attention(context: ModelContext, index: int, rotary: Rotary, name: str, eps: float) -> Attention:
        """With norms of all heads together."""
        model = context.description
        heads, kv_heads, size = model.num_q_heads, model.kv_specs[0].num_kv_heads, model.kv_specs[0].head_size
        norms = (
            ProjectionRMSNorm(context, heads, size, eps, f"{name}.q_norm"),
            ProjectionRMSNorm(context, kv_heads, size, eps, f"{name}.k_norm", shared=True),
        )
        bias = Olmoe.bias(model.config)
        return self_attention(context, index, rotary, name, qkv_bias=bias, o_bias=bias, norms=norms)
