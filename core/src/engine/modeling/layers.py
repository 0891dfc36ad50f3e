"""The layers of a decoder: norms, tables of vectors, the vocabulary's two ends, the feed-forward block.

Over several ranks each holds some rows of the vocabulary: an id's vector comes from the one that has it (the others
give zeros, and the sum goes round), and logits are gathered on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.linear import Linear, MergedColumnLinear, RowParallelLinear
from engine.modeling.module import Module, Param
from engine.modeling.parallel import group_of, vocabulary


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang, Sennrich 2019).

    Args:
        size: of the last dimension: hidden_size, or head_size where each head is normed alone.
        eps: added to the mean.
        name: the checkpoint's, without ".weight".
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        self._ops = context.ops
        self.size = size
        self.eps = eps
        self.name = name
        self._dtype = context.dtype
        self._device = context.device
        self._weight: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """`<name>.weight` [size]."""
        return [Param(f"{self.name}.weight", (self.size,), self)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy the weight, cast to the model's dtype."""
        self._weight = torch.empty(param.shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)

    @property
    def weight(self) -> torch.Tensor:
        """[size], once it is loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) for x, residual [T, size]; without a residual, (norm(x), x).

        The inputs are used up: the ops driver may write into their memory.
        """
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self.eps), x
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba, Kiros, Hinton 2016).

    Args:
        size: of the last dimension.
        eps: added to the variance.
        name: the checkpoint's, without ".weight" and ".bias".
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        self._ops = context.ops
        self.size = size
        self.eps = eps
        self.name = name
        self._dtype = context.dtype
        self._device = context.device
        self._tensors: dict[str, torch.Tensor] = {}

    def params(self) -> list[Param]:
        """`<name>.weight` and `<name>.bias`, [size] each."""
        return [Param(f"{self.name}.{kind}", (self.size,), self, kind) for kind in ("weight", "bias")]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy one of them, cast to the model's dtype."""
        self._tensors[param.key] = torch.empty(param.shape, dtype=self._dtype, device=self._device)
        self._tensors[param.key].copy_(tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.layer_norm(x, self._tensors["weight"], self._tensors["bias"], self.eps)


class Table(Module):
    """index [T] -> [T, size].

    Args:
        rows: in the checkpoint.
        name: the checkpoint's, without ".weight".
        first: the row that index 0 means; those before it are never read.
    """

    def __init__(self, context: ModelContext, rows: int, size: int, name: str, first: int = 0) -> None:
        self._ops = context.ops
        self.name = name
        self._first = first
        self._shape = (rows, size)
        self._dtype = context.dtype
        self._device = context.device
        self._weight: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """`<name>.weight` [rows, size]."""
        return [Param(f"{self.name}.weight", self._shape, self)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy the rows that are read, cast to the model's dtype."""
        rows, size = self._shape
        self._weight = torch.empty((rows - self._first, size), dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor[self._first :])

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        """index int [T] -> [T, size]."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._ops.embedding(index, self._weight)


class Embedding(Module):
    """token ids [T] -> [T, hidden_size].

    Args:
        name: the checkpoint's, e.g. "model.embed_tokens".

    Attributes:
        shape: of the rows on this rank.
    """

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, name: str) -> None:
        self._ops = context.ops
        self.name = name
        self._group = group_of(context)
        self._dtype = context.dtype
        self._device = context.device
        self._rows = vocabulary(vocab_size, context.tp_size)[context.tp_rank]
        self.shape = (self._rows.length, hidden_size)
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows [vocab_size / ranks, hidden_size], once they are loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def params(self) -> list[Param]:
        """`<name>.weight`."""
        shape = (self._rows.total, self.shape[1])
        return [Param(f"{self.name}.weight", shape, self, pieces=((self._rows.part,),))]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy the matrix, cast to the model's dtype."""
        self._weight = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        if self._group is None:
            return self._ops.embedding(ids, self.weight)
        return self._group.all_reduce(self._ops.embedding_part(ids, self.weight, self._rows.start))


class LMHead(Module):
    """hidden [R, hidden_size] -> logits [R, vocab_size], on every rank.

    Args:
        name: the checkpoint's, e.g. "lm_head".
        tied: the embedding whose matrix it shares; None where it has its own. A tied model's file may hold a copy
            under `name`, which is passed over.
    """

    def __init__(
        self,
        context: ModelContext,
        vocab_size: int,
        hidden_size: int,
        name: str,
        tied: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        self._ops = context.ops
        self.name = name
        self._tied = tied
        self._group = group_of(context)
        shards = vocabulary(vocab_size, context.tp_size)
        self._sizes = tuple(shard.length for shard in shards)
        self._own = None if tied else Linear(context, hidden_size, [shards[context.tp_rank]], [name], bias, kind="head")
        self._quantization = context.quantization.get("head")
        self._linear = context.ops.linear if self._quantization is None else self._quantization.linear
        self._packed: Any = None

    def tolerated(self) -> frozenset[str]:
        """The copy in a tied model's file."""
        return frozenset() if self._tied is None else frozenset({f"{self.name}.weight"})

    def finish(self) -> None:
        """Pack the shared matrix, which the embedding keeps as it is."""
        if self._tied is None:
            return
        if self._quantization is None:
            self._packed = self._ops.pack_linear(self._tied.weight, None)
        else:
            self._packed = self._quantization.pack("head", self._tied.weight, None)

    def own_bytes(self, itemsize: int) -> int:
        """Of the copy of a shared matrix that is quantised."""
        if self._quantization is None or self._packed is None:
            return super().own_bytes(itemsize)
        return self._quantization.packed_bytes(self._packed)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        logits = self._own(hidden) if self._own is not None else self._linear(hidden, self._packed)
        return logits if self._group is None else self._group.all_gather(logits, 1, self._sizes)


class GatedMLP(Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020).

    Args:
        name: the checkpoint's, e.g. "model.layers.0.mlp".
        bias: whether all three projections have one.
    """

    def __init__(
        self, context: ModelContext, hidden_size: int, intermediate_size: int, name: str, bias: bool = False
    ) -> None:
        self._ops = context.ops
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = MergedColumnLinear(context, hidden_size, [intermediate_size] * 2, names, bias)
        self.down = RowParallelLinear(context, intermediate_size, hidden_size, f"{name}.down_proj", bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.down(self._ops.silu_mul(self.gate_up(x)))
