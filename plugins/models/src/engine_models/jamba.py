"""Jamba (2024): Mamba's mixer in most layers, attention without positions in the others; some have routed experts."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import integer, number
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.jamba_card import Jamba
from engine_models.layers import Block, DecoderModel, Mixing, PreNormLayer, self_attention
from engine_states.layers import Mamba1Mixer


class JambaModel(DecoderModel):
    """JambaForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Jamba.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps", 1e-6)
        form, mixes, sparse = Jamba.mixer(config), Jamba.mixes(config), Jamba.sparse(config)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            block = f"{name}.feed_forward"
            if mixes[index]:
                mixing: Mixing = Mamba1Mixer(context, index, form, f"{name}.mamba")
            else:
                mixing = self_attention(context, index, None, f"{name}.self_attn")
            if sparse[index]:
                mlp: Block = routed_experts(context, Jamba, config, block, router="router")
            else:
                mlp = GatedMLP(context, size, inner, block)
            norms = [RMSNorm(context, size, eps, f"{name}.{one}_layernorm") for one in ("input", "pre_ff")]
            return PreNormLayer(context, norms[0], mixing, norms[1], mlp)

        norm = RMSNorm(context, size, eps, "model.final_layernorm")
        super().__init__(context, layer, norm, tied(config, False))
