"""The body of the linear layer for few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton

from engine_cuda.ops_triton.launching import power_of_2
from engine_cuda.ops_triton_gemv.kernel import gemv_kernel

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

MOST_ROWS = 4
"""Rows that the kernel takes; more go to torch's product, whose tensor cores then have something to do."""
WARPS = 4
ELEMENTS = 4096
"""Of the matrix that a program reads at once: four pieces of 16 bytes a thread, where an element has two."""
PROGRAMS = 264
"""At least so many, two for each multiprocessor of an H100: else blocks of fewer outputs."""


class PackedWeight(NamedTuple):
    """weight [O, I], dense, and bias [O]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class TritonGemvBody:
    """See `engine.interfaces.ops.Ops`. Without state; what is launched depends on shapes alone."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """weight [O, I], bias [O] -> what `linear` takes. Dense tensors are kept, not copied."""
        return PackedWeight(weight.contiguous(), None if bias is None else bias.contiguous())

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""
        weight, bias = packed
        rows, (outputs, inputs) = x.shape[0], weight.shape
        if not 0 < rows <= MOST_ROWS or not outputs or not inputs:
            return F.linear(x, weight, bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(rows, outputs)
        block, width = blocks(outputs, inputs, rows)
        gemv_kernel[(triton.cdiv(outputs, block),)](
            x, weight, bias, out, x.stride(0), outputs, rows, inputs, block, width, num_warps=WARPS
        )
        return out


def blocks(outputs: int, inputs: int, rows: int) -> tuple[int, int]:
    """(outputs of a program, inputs that it takes at a time): whole warps' reads of one row of the matrix, and as many
    programs as keep the GPU reading."""
    block = 8
    while block > 1 and triton.cdiv(outputs, block) < PROGRAMS:
        block //= 2
    # Three and four rows have more sums, 64 a thread as it is, and so fewer elements at once.
    width = ELEMENTS // (1 if rows <= 2 else 2) // block
    return block, max(16, min(width, power_of_2(inputs)))
