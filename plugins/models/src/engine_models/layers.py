"""Layers that several of the models share: the ways to put norms around blocks, and what stands at a decoder's ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import (
    Attention,
    ColumnParallelLinear,
    Decoder,
    Embedding,
    Linear,
    LMHead,
    Module,
    Norm,
    Param,
    RMSNorm,
    Rotary,
    RowParallelLinear,
    Stack,
    Weight,
    narrowed,
)
from engine.modeling.parallel import even, group_of, kv_heads
from engine_kit.encoder_layers import Table
from engine_kit.few_rows import FewRows
from engine_kit.pooled_decoders import of_pooling_model
from engine_kit.rounded_rows import RoundedRows

Block = Callable[[torch.Tensor], torch.Tensor]
Mixing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention, or a mixer in its place: of hidden states [T, hidden_size] and positions int64 [T] -> [T, hidden_size]."""


class PreNormLayer(Module):
    """norm, attention, norm, feed-forward; each block's output, times `scale`, is added to the residual by the norm
    that follows."""

    def __init__(
        self,
        context: ModelContext,
        attention_norm: Norm,
        attention: Mixing,
        mlp_norm: Norm,
        mlp: Block,
        scale: float = 1.0,
    ) -> None:
        self._ops = context.ops
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.scale = scale
        self._few_rows = FewRows(context, attention_norm, attention, mlp_norm, mlp)
        self._rounded_rows = RoundedRows(context, attention_norm, attention, mlp_norm, mlp)

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        if self.scale == 1.0 and (self._few_rows(state) or self._rounded_rows(state)):
            return
        hidden, residual = self.attention_norm.add(state["hidden"], state.get("residual"))
        hidden, residual = narrowed(self._ops, state, self.attention(hidden, state["positions"]), residual)
        hidden, residual = self.mlp_norm.add(self._scaled(hidden), residual)
        state["hidden"], state["residual"] = self._scaled(self.mlp(hidden)), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.scale == 1.0 else self._ops.scale(x, self.scale)


class SandwichLayer(Module):
    """norm, attention, norm, norm, feed-forward, norm: what each block gives is normed before it is added."""

    def __init__(
        self,
        context: ModelContext,
        before: Norm,
        attention: Attention,
        behind: Norm,
        mlp_before: Norm,
        mlp: Block,
        mlp_behind: Norm,
    ) -> None:
        self._ops = context.ops
        self.before = before
        self.attention = attention
        self.behind = behind
        self.mlp_before = mlp_before
        self.mlp = mlp
        self.mlp_behind = mlp_behind

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.before.add(state["hidden"], state.get("residual"))
        hidden, residual = narrowed(self._ops, state, self.attention(hidden, state["positions"]), residual)
        hidden, residual = self.mlp_before.add(self.behind(hidden), residual)
        state["hidden"], state["residual"] = self.mlp_behind(self.mlp(hidden)), residual


class PostNormLayer(Module):
    """attention, norm, feed-forward, norm: what each block gives is normed and added, what it reads is not normed."""

    def __init__(
        self, context: ModelContext, attention: Attention, attention_norm: Norm, mlp: Block, mlp_norm: Norm
    ) -> None:
        self._ops = context.ops
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        total, residual = state["hidden"], state.get("residual")
        if residual is not None:
            total = self._ops.add(total, residual)
        hidden, total = narrowed(self._ops, state, self.attention(total, state["positions"]), total)
        total = self._ops.add(self.attention_norm(hidden), total)
        state["hidden"], state["residual"] = self.mlp_norm(self.mlp(total)), total


class ParallelLayer(Module):
    """Attention and feed-forward side by side: both read the normed residual, and their sum is added to it.

    Args:
        mlp_norm: of what the feed-forward block reads, where it has a norm of its own.
    """

    def __init__(
        self, context: ModelContext, norm: Norm, attention: Attention, mlp: Block, mlp_norm: Norm | None = None
    ) -> None:
        self._ops = context.ops
        self.norm = norm
        self.attention = attention
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.norm.add(state["hidden"], state.get("residual"))
        attended = self.attention(hidden, state["positions"])
        if self.mlp_norm is None:
            attended, hidden, residual = narrowed(self._ops, state, attended, hidden, residual)
        else:
            attended, residual = narrowed(self._ops, state, attended, residual)
            hidden = self.mlp_norm(residual)
        state["hidden"], state["residual"] = self._ops.add(attended, self.mlp(hidden)), residual


class MLP(Module):
    """down(act(up(x))).

    Args:
        up, down: the checkpoint's names, e.g. "model.layers.0.mlp.fc1".
        act: "gelu_tanh" is gelu's approximation by tanh, "relu2" the square of relu. With relu the model's card names
            the operation "relu".
    """

    def __init__(
        self,
        context: ModelContext,
        hidden_size: int,
        intermediate_size: int,
        up: str,
        down: str,
        act: Literal["gelu", "gelu_tanh", "relu", "relu2"],
        bias: bool = True,
    ) -> None:
        self._ops = context.ops
        self._act = act
        self.up = ColumnParallelLinear(context, hidden_size, intermediate_size, up, bias)
        self.down = RowParallelLinear(context, intermediate_size, hidden_size, down, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        inner = self.up(x)
        if self._act in ("relu", "relu2"):
            return self.down(self._ops.relu(inner, self._act == "relu2"))
        return self.down(self._ops.gelu(inner, self._act == "gelu_tanh"))


class OffsetRMSNorm(RMSNorm):
    """RMS norm whose weight is stored less 1 (Gemma). The sum is rounded to the model's dtype once, while loading."""

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it, and add 1."""
        super().load(param, tensor.double() + 1)


class ProjectionRMSNorm(Weight):
    """RMS norm of all heads of queries or keys together (OLMo-2), over ranks too.

    Args:
        heads: of the whole model.
        shared: they are KV heads: where there are fewer than ranks, several ranks hold the same one. Each rank then has
            them as often as the others have, which leaves the mean as it is.
    """

    def __init__(
        self, context: ModelContext, heads: int, head_size: int, eps: float, name: str, shared: bool = False
    ) -> None:
        self.eps = eps
        self._group = group_of(context)
        divide = kv_heads if shared else even
        ranks = [replace(context, tp_rank=rank) for rank in range(context.tp_size)]
        shards = [divide(heads, rank, f"the heads of {name}").of_units(head_size) for rank in ranks]
        super().__init__(context, (heads * head_size,), name)
        self._shards = shards
        self._sizes = tuple(shard.length for shard in shards)
        self._first = sum(self._sizes[: context.tp_rank])

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy what belongs to each rank's heads, in the order in which they are gathered."""
        whole = torch.cat([tensor[shard.start : shard.start + shard.length] for shard in self._shards])
        self._weight = whole.to(self._device, self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads on this rank, head_size] -> the same shape."""
        flat = x.flatten(1)
        if self._group is None:
            return self._ops.rms_norm(flat, self.weight, self.eps).view(x.shape)
        whole = self._ops.rms_norm(self._group.all_gather(flat, 1, self._sizes), self.weight, self.eps)
        return whole.narrow(1, self._first, flat.shape[1]).unflatten(1, x.shape[1:])


class ScaledEmbedding(Embedding):
    """An embedding whose vectors are multiplied by a number, rounded to the model's dtype as transformers does it."""

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, name: str, factor: float) -> None:
        super().__init__(context, vocab_size, hidden_size, name)
        self._factor = torch.tensor(factor, dtype=context.dtype).item()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        return self.scaled(super().__call__(ids))

    def scaled(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors [T, hidden_size] times the number."""
        return self._ops.scale(vectors, self._factor)


class PlacedEmbedding(Embedding):
    """An embedding with learned vectors of positions beside it.

    Args:
        positions: how many there are.
        table: the name of theirs in the checkpoint.
        first: the row of position 0.
    """

    def __init__(self, context: ModelContext, size: int, name: str, positions: int, table: str, first: int = 0) -> None:
        super().__init__(context, context.description.vocab_size, size, name)
        self.table = Table(context, positions + first, size, table, first)

    def at(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids int [T], positions int64 [T] -> the sum of both vectors, [T, hidden_size]."""
        return self._ops.add(self(ids), self.table(positions))


class DecoderModel(Decoder):
    """A decoder from its parts, with Llama's names at its ends unless others are given.

    Args:
        layer: makes the layer of an index, with the context that it is given.
        norm: the last.
        tied: whether the embedding and the head share a matrix.
        embed: where it is not a plain `Embedding` "model.embed_tokens".
        head, head_bias: the head's name in the checkpoint, and whether it has a bias.

    Attributes:
        score_name: the name of the head that classifies.
    """

    score_name: ClassVar[str] = "score"

    def __init__(
        self,
        context: ModelContext,
        layer: Callable[[ModelContext, int], Module],
        norm: Norm,
        tied: bool,
        embed: Embedding | None = None,
        head: str = "lm_head",
        head_bias: bool = False,
    ) -> None:
        super().__init__(context)
        model = context.description
        self._head_name = head
        self.embed = embed or Embedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens")
        self.layers = Stack(context, model.num_layers, layer)
        self.norm = norm
        if model.generates:
            shared = self.embed if tied else None
            self.head = LMHead(context, model.vocab_size, model.hidden_size, head, shared, bias=head_bias)
        elif model.pooler.num_labels:
            self.score = Linear(context, model.hidden_size, [model.pooler.num_labels], [self.score_name], bias=False)

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor | None:
        """As `Decoder.forward`, with learned positions where the embedding has them."""
        if "hidden" not in state and isinstance(self.embed, PlacedEmbedding):
            state["hidden"] = self.embed.at(state["token_ids"], state["positions"])
        return super().forward(state, walk)

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The vectors, with learned positions where the embedding has them."""
        if isinstance(self.embed, PlacedEmbedding):
            return self.context.ops.add(vectors, self.embed.table(positions))
        return vectors

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `Decoder.load_weights`; a model that pools passes the head's tensors over, and takes the others with and
        without the prefix of its names."""
        if not self.context.description.generates:
            prefix = self.embed.name.partition(".")[0]
            weights = of_pooling_model(weights, self._head_name, self.score_name, prefix)
        super().load_weights(weights)


def self_attention(context: ModelContext, index: int, rotary: Rotary | None, name: str, **more: Any) -> Attention:
    """The attention of a decoder's layer, of the sizes that the description has.

    Args:
        name: the checkpoint's, e.g. "model.layers.0.self_attn".
        more: further arguments of `Attention`.
    """
    model = context.description
    spec = next(site for site in model.sites if site.layer == index and site.kind != "state")
    return Attention(
        context,
        index,
        hidden_size=model.hidden_size,
        num_q_heads=model.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        rotary=rotary,
        name=name,
        **more,
    )


def head_norms(context: ModelContext, name: str, eps: float) -> tuple[RMSNorm, RMSNorm]:
    """Norms of each head of queries, and of keys, in the attention of this name."""
    size = context.description.kv_specs[0].head_size
    return RMSNorm(context, size, eps, f"{name}.q_norm"), RMSNorm(context, size, eps, f"{name}.k_norm")
