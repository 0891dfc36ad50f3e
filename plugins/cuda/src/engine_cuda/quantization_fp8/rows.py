"""Rows rounded to fp8, each by its own largest number: the kernel, and the same in plain torch for weights.

A row's scale is largest / 448, such that the largest becomes the largest number of e4m3 and every other is rounded to
the nearest, half to even. Nothing is read back to the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import to_e4m3

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
def _quantize_rows_kernel(
    x, codes, scales, rows, row_stride, columns, padded, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: x [rows, columns] -> codes uint8 [rows, padded], zeros behind x's, and scales [rows]."""
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_n = tl.arange(0, BLOCK)[None, :]
    mask_m = offs_m < rows
    x += offs_m * row_stride
    codes += offs_m * padded
    if LOOPS:
        most = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            part = tl.load(x + start + offs_n, mask=mask_m & (start + offs_n < columns), other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(part))
        scale = tl.maximum(tl.div_rn(tl.max(most, 1, keep_dims=True), LARGEST), LEAST_SCALE)
        for start in range(0, padded, BLOCK):
            part = tl.load(x + start + offs_n, mask=mask_m & (start + offs_n < columns), other=0.0).to(tl.float32)
            code = to_e4m3(tl.div_rn(part, scale))
            tl.store(codes + start + offs_n, code, mask=mask_m & (start + offs_n < padded))
    else:
        whole = tl.load(x + offs_n, mask=mask_m & (offs_n < columns), other=0.0).to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(whole), 1, keep_dims=True), LARGEST), LEAST_SCALE)
        tl.store(codes + offs_n, to_e4m3(tl.div_rn(whole, scale)), mask=mask_m & (offs_n < padded))
    tl.store(scales + offs_m, scale, mask=mask_m)


def quantize_rows(x: torch.Tensor, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> codes [T, padded], with zeros behind x's columns, and scales [T, 1], float32.

    A row that is no number (NaN, infinity) gets codes that are none. One launch; nothing waits for it.
    """
    rows, columns = x.shape
    if x.stride(1) != 1 and columns > 1:
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
            x, codes, scales, rows, x.stride(0), columns, padded, each, block, loops, LARGEST, LEAST_SCALE,
            num_warps=warps,
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
