"""Phi-2 (Microsoft 2023), parallel blocks with biases everywhere; Phi-3 (2024), Llama's form in fused tensors; and
Phi-3.5-MoE (2024)."""

from __future__ import annotations

from dataclasses import replace

from engine.interfaces.model import ModelContext
from engine.modeling import GatedMLP, Module, RMSNorm
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.experts import routed_experts
from engine_models.layers import MLP, DecoderModel, ParallelLayer, PreNormLayer, self_attention
from engine_models.phi_card import Phi, Phi3, Phimoe


class PhiModel(DecoderModel):
    """PhiForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Phi.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_eps")
        head_size, normed = model.kv_specs[0].head_size, flag(config, "qk_layernorm", False)
        rotary = make_rotary(context, read_rope(config, head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = f"{name}.self_attn"
            norms = tuple(LayerNorm(context, head_size, eps, f"{attention}.{part}_layernorm") for part in "qk")
            return ParallelLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(
                    context,
                    index,
                    rotary,
                    attention,
                    out="dense",
                    qkv_bias=True,
                    o_bias=True,
                    norms=norms if normed else None,
                ),
                MLP(context, size, inner, f"{name}.mlp.fc1", f"{name}.mlp.fc2", Phi.act(config)),
            )

        norm = LayerNorm(context, size, eps, "model.final_layernorm")
        super().__init__(context, layer, norm, tied(config, False), head_bias=True)


class Phi3Model(DecoderModel):
    """Phi3ForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Phi3.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            return PreNormLayer(
                context,
                RMSNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", parts=("qkv_proj",)),
                RMSNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                GatedMLP(context, size, inner, f"{name}.mlp", parts=("gate_up_proj",)),
            )

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))


class PhimoeModel(DecoderModel):
    """PhimoeForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Phimoe.filled(context.description.config)
        size, eps, bias = model.hidden_size, number(config, "rms_norm_eps"), flag(config, "attention_bias", False)
        rope = read_rope(config, model.kv_specs[0].head_size)
        factor = Phimoe.attention_factor(config, context.max_model_len)
        rotary = make_rotary(context, replace(rope, attention_factor=factor))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            block = f"{name}.block_sparse_moe"
            return PreNormLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.input_layernorm"),
                self_attention(context, index, rotary, f"{name}.self_attn", qkv_bias=bias, o_bias=bias),
                LayerNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                routed_experts(context, Phimoe, config, block, parts=("w1", "w3", "w2")),
            )

        norm, head_bias = LayerNorm(context, size, eps, "model.norm"), flag(config, "lm_head_bias", False)
        super().__init__(context, layer, norm, tied(config, False), head_bias=head_bias)
