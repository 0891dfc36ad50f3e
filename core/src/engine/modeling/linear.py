"""Linear layers. Their weights are packed after loading, and the unpacked ones freed: by the ops driver, or by the
quantization driver of the layer's kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.loading import staging
from engine.modeling.module import Module, Param
from engine.modeling.parallel import Shard, even, group_of, kv_heads


class Linear(Module):
    """x [T, in_size] -> [T, sum of out_sizes]: one matrix, filled from one or more tensors of the checkpoint.

    Fused projections read their input once. The weight is allocated when its first tensor arrives and packed when its
    last one has, so that loading holds one unpacked layer at a time.

    Args:
        context: the model's.
        in_size: columns; a `Shard` where this rank holds some of them.
        out_sizes: rows of each fused part, in order; a `Shard` where this rank holds some of them.
        names: the checkpoint's name of each part, without ".weight" and ".bias"; one name where the checkpoint has all
            parts in one tensor, one after another.
        bias: whether every part has one.
        adds_bias: False where another rank adds the bias, which is then passed over here.
        kind: of layer, as `engine.interfaces.quantization` has them; None is never quantised.

    Attributes:
        in_size, out_sizes: on this rank.
    """

    kind: ClassVar[str | None] = None

    def __init__(
        self,
        context: ModelContext,
        in_size: int | Shard,
        out_sizes: Sequence[int | Shard],
        names: Sequence[str],
        bias: bool,
        *,
        adds_bias: bool = True,
        kind: str | None = None,
    ) -> None:
        self._kind = kind or self.kind
        self._quantization = None if self._kind is None else context.quantization.get(self._kind)
        self._linear = context.ops.linear if self._quantization is None else self._quantization.linear
        self._ops = context.ops
        self._dtype = context.dtype
        self._device = context.device
        self._in = Shard.of(in_size)
        self._out = tuple(Shard.of(size) for size in out_sizes)
        self.in_size = self._in.length
        self.out_sizes = tuple(shard.length for shard in self._out)
        self.names = tuple(names)
        self.bias = bias
        self._adds_bias = adds_bias
        self._tensors: dict[str, torch.Tensor] = {}
        self._packed: Any = None

    def params(self) -> list[Param]:
        """`<name>.weight` [out, in] and, with a bias, `<name>.bias` [out] for each part, with this rank's cut; for all
        parts together where they have one name."""
        fused = len(self.names) == 1
        params, start = [], 0
        for name, parts in zip(self.names, [self._out] if fused else [(out,) for out in self._out], strict=True):
            rows: list[slice] = []
            total, length = 0, 0
            for part in parts:
                rows.append(slice(total + part.start, total + part.start + part.length))
                total, length = total + part.total, length + part.length
            place = slice(start, start + length)
            weight = tuple((row, self._in.part) for row in rows)
            params.append(Param(f"{name}.weight", (total, self._in.total), self, ("weight", place), weight))
            if self.bias and self._adds_bias:
                params.append(Param(f"{name}.bias", (total,), self, ("bias", place), tuple((row,) for row in rows)))
            start += length
        return params

    def tolerated(self) -> frozenset[str]:
        """The biases that another rank adds."""
        return frozenset(f"{name}.bias" for name in self.names if self.bias and not self._adds_bias)

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy a part into its rows, cast to the model's dtype; a weight that is to be quantised keeps its own."""
        kind, rows = param.key
        if kind not in self._tensors:
            shape = (sum(self.out_sizes), *tensor.shape[1:])
            dtype = tensor.dtype if kind == "weight" and self._quantization is not None else self._dtype
            self._tensors[kind] = staging(shape, dtype, self._device)
        self._tensors[kind][rows].copy_(tensor)

    def finish(self) -> None:
        """Pack, and drop the unpacked weight."""
        weight, bias = self._tensors.pop("weight"), self._tensors.pop("bias", None)
        if self._quantization is None:
            self._packed = self._ops.pack_linear(weight, bias)
        else:
            assert self._kind is not None
            self._packed = self._quantization.pack(self._kind, weight, bias)

    def own_bytes(self, itemsize: int) -> int:
        """As the quantization driver packed them, else as `Module.own_bytes`."""
        if self._quantization is None or self._packed is None:
            return super().own_bytes(itemsize)
        return self._quantization.packed_bytes(self._packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T, sum of out_sizes]."""
        return self._linear(x, self._packed)


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are divided over ranks: y_rank = x @ weight[rows of this rank].T."""

    kind = "linear"

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        super().__init__(context, in_size, [even(out_size, context, name)], [name], bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided over ranks, and whose outputs are summed: every rank has the whole.

    Rank 0 adds the bias, once.
    """

    kind = "linear"

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        columns = even(in_size, context, name)
        super().__init__(context, columns, [out_size], [name], bias, adds_bias=context.tp_rank == 0)
        self._group = group_of(context)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size / ranks] -> [T, out_size]."""
        y = super().__call__(x)
        return y if self._group is None else self._group.all_reduce(y)


class MergedColumnLinear(Linear):
    """Several column-parallel layers over one input, in one matrix; the outputs follow one another (gate, up).

    Args:
        out_sizes: of the whole model.
        names: the checkpoint's, e.g. ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]; or one for all,
            e.g. ["model.layers.0.mlp.gate_up_proj"].
    """

    kind = "linear"

    def __init__(
        self, context: ModelContext, in_size: int, out_sizes: Sequence[int], names: Sequence[str], bias: bool = False
    ) -> None:
        assert len(names) in (1, len(out_sizes))
        local = [even(size, context, f"part {i} of {', '.join(names)}") for i, size in enumerate(out_sizes)]
        super().__init__(context, in_size, local, names, bias)


class QKVLinear(Linear):
    """Query, key and value projections in one matrix, divided over ranks by heads.

    A rank has the KV heads that its queries read; where there are fewer KV heads than ranks, several have the same.

    Args:
        num_q_heads, num_kv_heads: of the whole model.
        name: of the attention block, e.g. "model.layers.0.self_attn"; `parts` are the projections' names in it, or
            one name where the checkpoint has the three in one tensor.

    Attributes:
        num_q_heads, num_kv_heads: on this rank.
    """

    kind = "linear"

    def __init__(
        self,
        context: ModelContext,
        in_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        name: str,
        bias: bool = False,
        parts: tuple[str, str, str] | tuple[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        q = even(num_q_heads, context, f"the query heads of {name}")
        kv = kv_heads(num_kv_heads, context, f"the KV heads of {name}")
        self.num_q_heads = q.length
        self.num_kv_heads = kv.length
        self.head_size = head_size
        shards = [heads.of_units(head_size) for heads in (q, kv, kv)]
        self._widths = [shard.length for shard in shards]
        super().__init__(context, in_size, shards, [f"{name}.{part}" for part in parts], bias)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [T, in_size] -> q [T, num_q_heads, head_size], k and v [T, num_kv_heads, head_size], all views."""
        q, k, v = torch.split(super().__call__(x), self._widths, dim=-1)
        size = self.head_size
        return (
            q.unflatten(-1, (self.num_q_heads, size)),
            k.unflatten(-1, (self.num_kv_heads, size)),
            v.unflatten(-1, (self.num_kv_heads, size)),
        )
