"""Rows rounded to fp8, each by its own largest number: as they stand, or as a norm or an activation makes them in the
same kernel; and the same in plain torch for weights.

A row's scale is largest / 448, such that the largest becomes the largest number of e4m3 and every other is rounded to
the nearest, half to even. Nothing is read back to the host. What is made first is rounded as its own kernel would write
it (`ops_triton`), so that the codes are those of two launches. (A compiler may add up a norm's squares in
another order here and there: a few codes are then their neighbours.)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import to_e4m3
from engine_cuda.ops_triton.activations import silu_times
from engine_cuda.ops_triton.launching import start_dependent
from engine_cuda.ops_triton.norms import normed_rows, shape_of

INTERPRETED = interpreted()
FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 2.0**-120
"""Of a row of zeros, or of numbers next to nothing: dividing by it overflows nowhere."""
WIDEST = 16384
"""Columns that one program holds in registers; wider rows are read twice."""
CHUNK = 1 << 24
"""Elements of a weight that are rounded at once: what a load holds beside the weight is a few times as many bytes."""


@triton.jit
def _part(x, columns, mask, GATED: tl.constexpr):
    """Some of a row, float32; where GATED silu of it times what lies `columns` behind, rounded to x's type."""
    part = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        times = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        part = silu_times(part, times).to(x.dtype.element_ty).to(tl.float32)
    return part


@triton.jit
def _quantize_rows_kernel(
    x, codes, scales, rows, row_stride, columns, padded, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    GATED: tl.constexpr, DEPENDENT: tl.constexpr, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: x [rows, columns] -> codes uint8 [rows, padded], zeros behind x's, and scales [rows]. Where
    GATED x is [rows, 2 * columns], and silu of its first half times the second is rounded."""
    start_dependent(DEPENDENT)
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_n = tl.arange(0, BLOCK)[None, :]
    mask_m = offs_m < rows
    x += offs_m * row_stride
    codes += offs_m * padded
    if LOOPS:
        most = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            part = _part(x + start + offs_n, columns, mask_m & (start + offs_n < columns), GATED)
            most = tl.maximum(most, tl.abs(part))
        scale = tl.maximum(tl.div_rn(tl.max(most, 1, keep_dims=True), LARGEST), LEAST_SCALE)
        for start in range(0, padded, BLOCK):
            part = _part(x + start + offs_n, columns, mask_m & (start + offs_n < columns), GATED)
            code = to_e4m3(tl.div_rn(part, scale))
            tl.store(codes + start + offs_n, code, mask=mask_m & (start + offs_n < padded))
    else:
        whole = _part(x + offs_n, columns, mask_m & (offs_n < columns), GATED)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(whole), 1, keep_dims=True), LARGEST), LEAST_SCALE)
        tl.store(codes + offs_n, to_e4m3(tl.div_rn(whole, scale)), mask=mask_m & (offs_n < padded))
    tl.store(scales + offs_m, scale, mask=mask_m)


@triton.jit(do_not_specialize=["rows"])
def _normed_rows_kernel(
    x, residual, weight, codes, scales, rows, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """The RMS norm of x [rows, SIZE] -> codes uint8 [rows, PADDED], zeros behind it, and scales [rows]; with a residual
    of x + residual, which is written there. Grid: blocks of ROWS rows."""
    start_dependent(DEPENDENT)
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK)
    mask_m = (offs_m < rows)[:, None]
    mask = mask_m & (offs_n < SIZE)[None]
    offs = offs_m[:, None] * SIZE + offs_n[None]
    wide = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + offs, mask=mask, other=0.0).to(tl.float32)
        added = wide.to(residual.dtype.element_ty)
        tl.store(residual + offs, added, mask=mask)
        wide = added.to(tl.float32)
    normed = normed_rows(wide, weight, offs_n, eps, SIZE, x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(normed), 1, keep_dims=True), LARGEST), LEAST_SCALE)
    code = to_e4m3(tl.div_rn(normed, scale))
    tl.store(codes + offs_m[:, None] * PADDED + offs_n[None], code, mask=mask_m & (offs_n < PADDED)[None])
    tl.store(scales + offs_m[:, None], scale, mask=mask_m)


def quantize_normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    padded: int,
    dependent: Mapping[str, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """quantize_rows of the RMS norm of x + residual [T, I] -> its codes and scales, and x + residual, which is written
    into the residual where that is dense. Without a residual of x, which is given back. One launch."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    rows, size = x.shape
    codes = torch.empty(rows, padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        grid, block, each, warps = shape_of(rows, padded)
        _normed_rows_kernel[grid](
            x, residual, weight, codes, scales, rows, eps, size, padded, each, block, bool(dependent), LARGEST,
            LEAST_SCALE, num_warps=warps, **dependent,
        )  # fmt: skip
    return codes.view(FP8), scales, x if residual is None else residual


def quantize_rows(
    x: torch.Tensor, padded: int, gated: bool = False, dependent: Mapping[str, bool] = MappingProxyType({})
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> codes [T, padded], with zeros behind x's columns, and scales [T, 1], float32.

    A row that is no number (NaN, infinity) gets codes that are none. One launch; nothing waits for it.

    Args:
        gated: x is [T, 2 * I], and what is rounded silu of its first half times the second.
        dependent: what the launch is made with, see `engine_cuda.dependents`.
    """
    rows, columns = x.shape
    columns = columns // 2 if gated else columns
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    codes = torch.empty(rows, padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(padded)
        loops = block > WIDEST
        block = WIDEST // 2 if loops else block
        # The interpreter takes as long for one row as for many.
        each = 64 if INTERPRETED else max(1, 512 // block)
        warps = min(16, max(1, block // 512))
        _quantize_rows_kernel[(triton.cdiv(rows, each),)](
            x, codes, scales, rows, x.stride(0), columns, padded, each, block, loops, gated, bool(dependent), LARGEST,
            LEAST_SCALE, num_warps=warps, **dependent,
        )  # fmt: skip
    return codes.view(FP8), scales


def quantize_weight(
    weight: torch.Tensor, outputs: int, inputs: int, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [O, I] -> codes [outputs, inputs], with zeros behind the weight's, and scales float32.

    The scales are [1, outputs] for one each, and one of no dimension for all. In plain torch, a part at a time.
    """
    codes = torch.zeros(outputs, inputs, dtype=FP8, device=weight.device)
    scales = torch.full((1, outputs), LEAST_SCALE, dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK // max(1, weight.shape[1]))
    parts = [slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step)]
    if weight.numel():
        for part in parts:
            largest = weight[part].float().abs().amax(1)
            scales[0, part] = torch.clamp(largest / LARGEST, min=LEAST_SCALE)
    if not per_channel:
        scales = scales.amax()
    for part in parts:
        scale = scales[0, part].unsqueeze(1) if per_channel else scales
        codes[part, : weight.shape[1]] = (weight[part].float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
    return codes, scales
