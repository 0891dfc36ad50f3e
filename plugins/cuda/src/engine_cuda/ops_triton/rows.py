"""Rows of a matrix by index: embedding, its part on one rank, gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.ops_triton.launching import power_of_2


@triton.jit(do_not_specialize=["first", "count"])
def gather_kernel(index, rows, out, first, count, width, row_stride, BLOCK: tl.constexpr):
    """out[t] = rows[index[t] - first], zeros where that is no row. Grid: (T, blocks of the width)."""
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < width
    row = tl.load(index + token).to(tl.int64) - first
    x = tl.load(rows + row * row_stride + offs_n, mask=mask_n & ((row >= 0) & (row < count)), other=0.0)
    tl.store(out + token * width + offs_n, x, mask=mask_n)


class Rows:
    """Operations that pick rows. An index that names no row gives zeros, so that no memory but the matrix is read."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int [T], weight [V, H] -> [T, H]."""
        return _gather(ids, weight, 0)

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        """ids int [T], weight [V', H] -> [T, H]; zeros for ids outside first .. first + V' - 1."""
        return _gather(ids, weight, first)

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [T, H], index int [R] -> [R, H]."""
        return _gather(index, x, 0)


def _gather(index: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, width = rows.shape
    out = rows.new_empty(len(index), width)
    if out.numel():
        block = min(power_of_2(width), 2048)
        grid = (len(index), triton.cdiv(width, block))
        gather_kernel[grid](
            index, rows, out, first, count, width, rows.stride(0), block, num_warps=max(1, block // 512)
        )
    return out
