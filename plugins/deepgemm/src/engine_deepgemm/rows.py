"""Rows rounded to e4m3 with a scale for each 128 inputs, laid out as DeepGEMM's tensor copies read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted
from engine_cuda.interpreter_shim import to_e4m3

INTERPRETED = interpreted()
FP8 = torch.float8_e4m3fn
GROUP: tl.constexpr = tl.constexpr(128)
LARGEST = 448.0
LEAST_SCALE = 2.0**-120
"""Of a group of zeros, or of numbers next to nothing: dividing by it overflows nowhere."""
ALIGNED = 4
"""Scales of so many rows are 16 bytes, of which a tensor copy's stride is a multiple."""


@triton.jit
def _quantize_groups_kernel(
    x, codes, scales, rows, columns, row_stride, width, scale_row_stride, scale_group_stride,
    ROWS: tl.constexpr, POWER: tl.constexpr, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one group a program: x [rows, columns] -> codes uint8 [rows, width], zeros behind x's; scales."""
    offs_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    group = tl.program_id(1)
    offs_k = group * GROUP + tl.arange(0, GROUP)[None, :]
    mask_m = offs_m < rows
    part = tl.load(x + offs_m * row_stride + offs_k, mask=mask_m & (offs_k < columns), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(part), 1, keep_dims=True), LARGEST), LEAST_SCALE)
    if POWER:  # the next power of two: the exponent, and one more where anything stands behind the point
        bits = scale.to(tl.int32, bitcast=True)
        bits = ((bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)) << 23
        scale = bits.to(tl.float32, bitcast=True)
    tl.store(codes + offs_m * width + offs_k, to_e4m3(tl.div_rn(part, scale)), mask=mask_m)
    tl.store(scales + offs_m * scale_row_stride + group * scale_group_stride, scale, mask=mask_m)


def quantize_groups(x: torch.Tensor, width: int, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> codes e4m3 [T, width], width being a multiple of 128, with zeros behind x's columns, and scales
    float32 [T, width / 128]: those of one group lie together, from a multiple of 16 bytes on, or those of one row do
    where they are powers of two, which the library packs by itself. One launch."""
    rows, columns = x.shape
    if x.stride(1) != 1 and columns > 1:
        x = x.contiguous()
    groups = width // GROUP.value
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    if power_of_two:
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    else:
        padded = -(-rows // ALIGNED) * ALIGNED
        scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device).T[:rows]
    if rows:
        each = 64 if INTERPRETED else 8
        _quantize_groups_kernel[(triton.cdiv(rows, each), groups)](
            x, codes, scales, rows, columns, x.stride(0), width, scales.stride(0), scales.stride(1), each, power_of_two,
            LARGEST, LEAST_SCALE, num_warps=4,
        )  # fmt: skip
    return codes.view(FP8), scales
