"""BLOOM (Workshop 2022): ALiBi, a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, Module
from engine_kit.encoder_layers import LayerNorm
from engine_kit.model_config import integer, number
from engine_models.alibi import bloom_slopes, on_this_rank
from engine_models.bloom_card import Bloom
from engine_models.decoder_card import tied
from engine_models.grouped_qkv import in_order
from engine_models.layers import MLP, DecoderModel, PreNormLayer, self_attention


class NormedEmbedding(Embedding):
    """An embedding whose vectors are normed."""

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        super().__init__(context, context.description.vocab_size, size, name)
        self.norm = LayerNorm(context, size, eps, f"{name}_layernorm")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        return self.norm(super().__call__(ids))


class BloomModel(DecoderModel):
    """BloomForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        model, config = context.description, Bloom.filled(context.description.config)
        size, inner, eps = model.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_epsilon")
        slopes = on_this_rank(context, bloom_slopes(model.num_q_heads))

        def layer(context: ModelContext, index: int) -> Module:
            name = f"transformer.h.{index}"
            attention = self_attention(
                context,
                index,
                None,
                f"{name}.self_attention",
                parts=("query_key_value",),
                out="dense",
                qkv_bias=True,
                o_bias=True,
                alibi_slopes=slopes,
            )
            up, down = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
            return PreNormLayer(
                context,
                LayerNorm(context, size, eps, f"{name}.input_layernorm"),
                attention,
                LayerNorm(context, size, eps, f"{name}.post_attention_layernorm"),
                MLP(context, size, inner, up, down, "gelu_tanh"),
            )

        embed = NormedEmbedding(context, size, eps, "transformer.word_embeddings")
        norm = LayerNorm(context, size, eps, "transformer.ln_f")
        super().__init__(context, layer, norm, tied(config, True), embed)
        self._normed = embed.norm

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The vectors, normed as embeddings are."""
        return self._normed(vectors)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; each head's query, key and value stand together, and BLOOM's own files have
        names without the prefix "transformer."."""
        own = ("word_embeddings", "h.", "ln_f.")
        named = ((f"transformer.{name}" if name.startswith(own) else name, tensor) for name, tensor in weights)
        head_size = self.context.description.kv_specs[0].head_size
        super().load_weights(in_order(named, ".self_attention.query_key_value", 1, head_size))
