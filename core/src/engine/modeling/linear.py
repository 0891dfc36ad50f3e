"""Linear layers. Their weights are packed by the ops driver after loading, and the unpacked ones freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.module import Module, Slot
from engine.modeling.parallel import partition


class Linear(Module):
    """x [T, in_size] -> [T, sum of out_sizes]: one matrix, filled from one or more tensors of the checkpoint.

    Fused projections read their input once. The weight is allocated when its first tensor arrives and packed when its
    last one has, so that loading holds one unpacked layer at a time.

    Args:
        context: the model's.
        in_size: columns on this rank.
        out_sizes: rows on this rank of each fused part, in order.
        names: the checkpoint's name of each part, without ".weight" and ".bias".
        bias: whether every part has one.
    """

    def __init__(
        self, context: ModelContext, in_size: int, out_sizes: Sequence[int], names: Sequence[str], bias: bool
    ) -> None:
        self._ops = context.ops
        self._dtype, self._device = context.dtype, context.device
        self.in_size, self.out_sizes, self.names, self.bias = in_size, tuple(out_sizes), tuple(names), bias
        self._tensors: dict[str, torch.Tensor] = {}
        self._packed: Any = None

    def slots(self) -> list[Slot]:
        """`<name>.weight` [out, in] and, with a bias, `<name>.bias` [out] for each part."""
        slots, start = [], 0
        for name, rows in zip(self.names, self.out_sizes, strict=True):
            cut = slice(start, start + rows)
            slots.append(Slot(f"{name}.weight", (rows, self.in_size), self, ("weight", cut)))
            if self.bias:
                slots.append(Slot(f"{name}.bias", (rows,), self, ("bias", cut)))
            start += rows
        return slots

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy a part into its rows, cast to the model's dtype."""
        kind, rows = slot.key
        if kind not in self._tensors:
            shape = (sum(self.out_sizes), *slot.shape[1:])
            self._tensors[kind] = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._tensors[kind][rows].copy_(tensor)

    def finish(self) -> None:
        """Pack, and drop the unpacked weight."""
        self._packed = self._ops.pack_linear(self._tensors.pop("weight"), self._tensors.pop("bias", None))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_size] -> [T, sum of out_sizes]."""
        return self._ops.linear(x, self._packed)


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs are divided over ranks: y_rank = x @ weight[rows of this rank].T."""

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        super().__init__(context, in_size, [partition(out_size, context, name)], [name], bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided over ranks; the ranks' outputs are to be summed."""

    def __init__(self, context: ModelContext, in_size: int, out_size: int, name: str, bias: bool = False) -> None:
        super().__init__(context, partition(in_size, context, name), [out_size], [name], bias)


class MergedColumnLinear(Linear):
    """Several column-parallel layers over one input, in one matrix; the outputs follow one another (gate, up).

    Args:
        out_sizes: of the whole model.
        names: the checkpoint's, e.g. ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"].
    """

    def __init__(
        self, context: ModelContext, in_size: int, out_sizes: Sequence[int], names: Sequence[str], bias: bool = False
    ) -> None:
        local = [partition(size, context, name) for size, name in zip(out_sizes, names, strict=True)]
        super().__init__(context, in_size, local, names, bias)


class QKVLinear(Linear):
    """Query, key and value projections in one matrix, divided over ranks by heads.

    Args:
        num_q_heads, num_kv_heads: of the whole model.
        name: of the attention block, e.g. "model.layers.0.self_attn"; `parts` are the projections' names in it.
    """

    def __init__(
        self,
        context: ModelContext,
        in_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        name: str,
        bias: bool = False,
        parts: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        self.num_q_heads = partition(num_q_heads, context, name)
        self.num_kv_heads = partition(num_kv_heads, context, name)
        self.head_size = head_size
        self._widths = [heads * head_size for heads in (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)]
        super().__init__(context, in_size, self._widths, [f"{name}.{part}" for part in parts], bias)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [T, in_size] -> q [T, num_q_heads, head_size], k and v [T, num_kv_heads, head_size], all views."""
        q, k, v = torch.split(super().__call__(x), self._widths, dim=-1)
        size = self.head_size
        return (
            q.unflatten(-1, (self.num_q_heads, size)),
            k.unflatten(-1, (self.num_kv_heads, size)),
            v.unflatten(-1, (self.num_kv_heads, size)),
        )
