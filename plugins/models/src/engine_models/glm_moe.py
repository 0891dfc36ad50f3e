"""GLM-4-MoE (Zhipu 2025): Llama's form with a few dense layers, then routed experts beside shared ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts, without_layers
from engine_models.glm_moe_card import Glm4Moe
from engine_models.layers import DecoderModel, PreNormLayer, head_norms, self_attention


class Glm4MoeModel(DecoderModel):
    """Glm4MoeForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Glm4Moe.filled(context.description.config)
        size, eps = model.hidden_size, number(config, "rms_norm_eps")
        bias = flag(config, "attention_bias", False)
        qk_norm = flag(config, "use_qk_norm", False)
        dense = integer(config, "first_k_dense_replace", low=0)
        shared_size = integer(config, "moe_intermediate_size") * integer(config, "n_shared_experts")
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            if index < dense:
                block: Any = GatedMLP(context, size, integer(config, "intermediate_size"), f"{name}.mlp")
            else:
                shared = GatedMLP(context, size, shared_size, f"{name}.mlp.shared_experts")
                bias_name = "gate.e_score_correction_bias"
                block = routed_experts(context, Glm4Moe, config, f"{name}.mlp", bias=bias_name, shared=shared)
            norms = head_norms(context, f"{name}.self_attn", eps) if qk_norm else None
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, norms=norms),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                block,
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; layers that predict further tokens are passed over."""
        model = self.context.description
        super().load_weights(without_layers(weights, model.config, model.num_layers))
