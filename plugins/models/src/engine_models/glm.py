"""ChatGLM2 and 3 (Zhipu 2023), GLM-4 (2024, 2025): rotary positions of a part of each head whose pairs are neighbours,
fused gate and up."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Attention, Embedding, GatedMLP, Module, RMSNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.glm_card import ChatGLM, Glm, Glm4
from engine_models.layers import DecoderModel, PreNormLayer, SandwichLayer, self_attention


class GlmModel(DecoderModel):
    """GlmForCausalLM, and what Glm4ForCausalLM has of it."""

    card: type[Glm] = Glm

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, self.card.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "rms_norm_eps")
        bias, rope = flag(config, "attention_bias", True), read_rope(config, model.kv_specs[0].head_size)
        rotary = make_rotary(context, rope)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"model.layers.{index}"
            attention = self_attention(
                context, index, rotary, f"{name}.self_attn", interleaved=rope.rotary_dim, qkv_bias=bias
            )
            mlp = GatedMLP(context, size, inner, f"{name}.mlp", parts=("gate_up_proj",))
            return self.around(context, name, size, eps, attention, mlp)

        super().__init__(context, layer, RMSNorm(context, size, eps, "model.norm"), tied(config, False))

    @staticmethod
    def around(context: ModelContext, name: str, size: int, eps: float, attention: Attention, mlp: GatedMLP) -> Module:
        """The layer of two blocks."""
        before, behind = (
            RMSNorm(context, size, eps, f"{name}.{part}_layernorm") for part in ("input", "post_attention")
        )
        return PreNormLayer(context, before, attention, behind, mlp)


class Glm4Model(GlmModel):
    """Glm4ForCausalLM."""

    card = Glm4

    @staticmethod
    def around(context: ModelContext, name: str, size: int, eps: float, attention: Attention, mlp: GatedMLP) -> Module:
        """The layer of two blocks."""
        norms = [
            RMSNorm(context, size, eps, f"{name}.{part}_layernorm")
            for part in ("input", "post_self_attn", "post_attention", "post_mlp")
        ]
        return SandwichLayer(context, norms[0], attention, norms[1], norms[2], mlp, norms[3])


class ChatGLMModel(DecoderModel):
    """ChatGLMModel, ChatGLMForConditionalGeneration."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, ChatGLM.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layernorm_epsilon")
        bias, rope = flag(config, "add_qkv_bias", False), read_rope(config, model.kv_specs[0].head_size)
        rotary = make_rotary(context, rope)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"transformer.encoder.layers.{index}"
            attention = self_attention(
                context,
                index,
                rotary,
                f"{name}.self_attention",
                parts=("query_key_value",),
                out="dense",
                interleaved=rope.rotary_dim,
                qkv_bias=bias,
            )
            mlp = GatedMLP(context, size, inner, f"{name}.mlp", parts=("dense_h_to_4h",), down="dense_4h_to_h")
            before, behind = (
                RMSNorm(context, size, eps, f"{name}.{part}_layernorm") for part in ("input", "post_attention")
            )
            return PreNormLayer(context, before, attention, behind, mlp)

        embed = Embedding(context, model.vocab_size, size, "transformer.embedding.word_embeddings")
        norm = RMSNorm(context, size, eps, "transformer.encoder.final_layernorm")
        super().__init__(context, layer, norm, tied(config, False), embed, head="transformer.output_layer")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`, without the table of rotary positions."""
        super().load_weights(pair for pair in weights if pair[0] != "transformer.rotary_pos_emb.inv_freq")
