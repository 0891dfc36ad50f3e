"""Falcon (Almazrouei et al. 2023): one KV head or a few, parallel blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.decoder_card import tied
from engine_models.falcon_card import Falcon
from engine_models.grouped_qkv import in_order
from engine_models.layers import MLP, DecoderModel, ParallelLayer, PreNormLayer, self_attention


class FalconModel(DecoderModel):
    """FalconForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Falcon.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_epsilon")
        bias, parallel = flag(config, "bias", False), flag(config, "parallel_attn", True)
        both = Falcon.norms(config) == 2
        rotary = make_rotary(context, read_rope(config, model.kv_specs[0].head_size))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"transformer.h.{index}"
            attention = self_attention(
                context,
                index,
                rotary,
                f"{name}.self_attention",
                parts=("query_key_value",),
                out="dense",
                qkv_bias=bias,
                o_bias=bias,
            )
            up, down = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
            mlp = MLP(context, size, inner, up, down, Falcon.act(config), bias)
            if parallel and both:
                norms = (LayerNorm(context, size, eps, f"{name}.{part}") for part in ("ln_attn", "ln_mlp"))
                return ParallelLayer(context, next(norms), attention, mlp, next(norms))
            before = LayerNorm(context, size, eps, f"{name}.input_layernorm")
            if parallel:
                return ParallelLayer(context, before, attention, mlp)
            behind = LayerNorm(context, size, eps, f"{name}.post_attention_layernorm")
            return PreNormLayer(context, before, attention, behind, mlp)

        embed = Embedding(context, model.vocab_size, size, "transformer.word_embeddings")
        norm = LayerNorm(context, size, eps, "transformer.ln_f")
        super().__init__(context, layer, norm, tied(config, True), embed)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; each KV head's queries, key and value stand together in the checkpoint."""
        model = self.context.description
        spec = model.kv_specs[0]
        queries = model.num_q_heads // spec.num_kv_heads
        super().load_weights(in_order(weights, ".self_attention.query_key_value", queries, spec.head_size))
