"""The operations of adapters, as engine-lora defines them: shrink and expand, over tokens sorted by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.adapter_kernels import expand_kernel, shrink_kernel
from engine_cuda.ops_triton.launching import power_of_2

ROWS = 16
"""Tokens of a program."""
STEP = 64
"""Of a rank, what is multiplied at a time."""
TILE_BYTES = 16384
"""Of a matrix that a program holds at once."""
LEAST_RANK = 16
"""Of matrices in memory, which tensor cores want; zeros stand behind an adapter's own rank."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [r, I] and B [O, r] of a part."""


def width_of(rank: int, itemsize: int) -> int:
    """The inputs that a program multiplies at a time, and its outputs."""
    return max(16, min(64, TILE_BYTES // (rank * itemsize)))


class AdapterMemory(NamedTuple):
    """A layer's places, the first of which stands for nobody.

    Args:
        outputs: of each part.
        a: [places + 1, parts, R, I]; b: [places + 1, O, R].
    """

    outputs: tuple[int, ...]
    a: torch.Tensor
    b: torch.Tensor


class PackedAdapter(NamedTuple):
    """One adapter's part of `AdapterMemory`, on the host: a [parts, R, I], b [O, R]."""

    a: torch.Tensor
    b: torch.Tensor


class Adapters(MayDepend):
    """See engine_lora.ops_lora. What is launched depends on shapes alone."""

    device: torch.device | None

    def lora_memory(
        self, inputs: int, outputs: Sequence[int], places: int, max_rank: int, dtype: torch.dtype
    ) -> AdapterMemory:
        """Room for so many adapters of the largest rank, on the device of the operations."""
        rank, device = max(LEAST_RANK, power_of_2(max_rank)), self.device
        a = torch.zeros(places + 1, len(outputs), rank, inputs, dtype=dtype, device=device)
        return AdapterMemory(tuple(outputs), a, torch.zeros(places + 1, sum(outputs), rank, dtype=dtype, device=device))

    def lora_pack(self, memory: AdapterMemory, parts: Sequence[Pair | None]) -> PackedAdapter:
        """Filled up with zeros."""
        a, b = (torch.zeros(x.shape[1:], dtype=x.dtype) for x in (memory.a, memory.b))
        column = 0
        for index, (pair, size) in enumerate(zip(parts, memory.outputs, strict=True)):
            if pair is not None:
                rank = pair[0].shape[0]
                a[index, :rank] = pair[0]
                b[column : column + size, :rank] = pair[1]
            column += size
        return PackedAdapter(a, b)

    def lora_place(self, memory: AdapterMemory, place: int, packed: PackedAdapter | None) -> None:
        """Copied, in order with what is launched."""
        for to, of_adapter in zip((memory.a, memory.b), packed or (None, None), strict=True):
            if of_adapter is None:
                to[place].zero_()
            else:
                to[place].copy_(of_adapter)

    def lora_add(
        self, x: torch.Tensor, y: torch.Tensor, memory: AdapterMemory, tokens: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """x [T, I], y [T, O], which is written into."""
        if not len(x):
            return y
        if x.stride(-1) != 1:
            x = x.contiguous()
        places, (_, parts, rank, inputs) = len(memory.a) - 1, memory.a.shape
        inner = x.new_empty((len(x), parts, rank))
        blocks, width = triton.cdiv(len(x), ROWS), width_of(rank, x.itemsize)
        shrink_kernel[(blocks, places, parts)](
            x, memory.a, inner, tokens, starts, x.stride(0), INPUTS=inputs, PARTS=parts, RANK=rank, ROWS=ROWS,
            WIDTH=width, DEPENDENT=bool(self.dependent), **self.dependent,
        )  # fmt: skip
        column = 0
        for part, size in enumerate(memory.outputs):
            expand_kernel[(blocks, places, triton.cdiv(size, width))](
                inner, memory.b, y, tokens, starts, y.stride(0), part, column, size, memory.b.shape[1], PARTS=parts,
                RANK=rank, STEP=min(rank, STEP), ROWS=ROWS, COLUMNS=width, DEPENDENT=bool(self.dependent),
                **self.dependent,
            )  # fmt: skip
            column += size
        return y
