"""GPT-2's layers, made of the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import (
    ColumnParallelLinear,
    Embedding,
    LMHead,
    ModelBody,
    Module,
    Param,
    QKVLinear,
    RowParallelLinear,
)
from engine_gpt2.card import ACTIVATIONS, inner_size
from engine_kit.encoder_layers import LayerNorm, Table
from engine_kit.model_config import flag, number


class _Turned:
    """A linear layer whose matrix the checkpoint stores as [in, out]."""

    def params(self) -> list[Param]:
        found: list[Param] = super().params()  # type: ignore[misc]
        return [
            dataclasses.replace(param, shape=param.shape[::-1], pieces=tuple(piece[::-1] for piece in param.pieces))
            for param in found
        ]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        super().load(param, tensor.t())  # type: ignore[misc]


class Column(_Turned, ColumnParallelLinear):
    """Outputs divided over ranks."""


class Row(_Turned, RowParallelLinear):
    """Inputs divided over ranks."""


class FusedQKV(_Turned, QKVLinear):
    """Queries, keys and values, which the checkpoint stores as one matrix [in, 3 * in]."""


class GPT2Layer(Module):
    """norm, attention, norm, feed-forward; each block's output is added to what came in."""

    def __init__(self, context: ModelContext, index: int, eps: float) -> None:
        model, config, self._ops = context.description, context.description.config, context.ops
        size, spec, name = model.hidden_size, model.kv_specs[index], f"h.{index}"
        scale = spec.head_size**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
        if flag(config, "scale_attn_by_inverse_layer_idx", False):
            scale /= index + 1
        self._tanh = ACTIVATIONS[config.get("activation_function", "gelu_new")]
        self.attention_norm = LayerNorm(context, size, eps, f"{name}.ln_1")
        heads = model.num_q_heads
        self.qkv = FusedQKV(context, size, heads, heads, spec.head_size, f"{name}.attn", bias=True, parts=("c_attn",))
        self.attend = context.attention(index, scale)
        self.attention_out = Row(context, size, size, f"{name}.attn.c_proj", bias=True)
        self.mlp_norm = LayerNorm(context, size, eps, f"{name}.ln_2")
        self.up = Column(context, size, inner_size(config), f"{name}.mlp.c_fc", bias=True)
        self.down = Row(context, inner_size(config), size, f"{name}.mlp.c_proj", bias=True)

    def __call__(self, state: State) -> None:
        """Change `hidden` [T, n_embd] in the state."""
        hidden = state["hidden"]
        attended = self.attend(*self.qkv(self.attention_norm(hidden)))
        hidden = self._ops.add(hidden, self.attention_out(attended))
        inner = self._ops.gelu(self.up(self.mlp_norm(hidden)), self._tanh)
        state["hidden"] = self._ops.add(hidden, self.down(inner))


class GPT2(ModelBody):
    """See `engine.interfaces.model.Model`."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        eps = number(config, "layer_norm_epsilon", 1e-5)
        self.words = Embedding(context, model.vocab_size, model.hidden_size, "wte")
        self.positions = Table(context, model.max_model_len, model.hidden_size, "wpe")
        self.layers = [GPT2Layer(context, index, eps) for index in range(model.num_layers)]
        self.norm = LayerNorm(context, model.hidden_size, eps, "ln_f")
        tied = self.words if flag(config, "tie_word_embeddings", True) else None
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", tied)

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The final, normed hidden states [T, n_embd]."""
        if "hidden" not in state:
            state["hidden"] = self.context.ops.add(
                self.words(state["token_ids"]), self.positions(self.places(state["positions"]))
            )
        for layer in walk(self.layers, state):
            layer(state)
        return self.norm(state["hidden"])

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the table of positions [T]."""
        return positions

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, n_embd] -> [R, vocab_size]."""
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`; names may have the prefix "transformer.", and old files hold causal masks."""
        super().load_weights(self._named(weights))

    @staticmethod
    def _named(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if not name.endswith((".attn.bias", ".attn.masked_bias")):
                yield name.removeprefix("transformer."), tensor
