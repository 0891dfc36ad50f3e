"""The product of a few rows with a matrix, which waits for the matrix to come from memory.

Each element of the matrix is used once for each row, so tensor cores have nothing to do: a program reads some of the
matrix's rows, each from end to end in pieces of 16 bytes a thread, multiplies them with the inputs in float32, and adds
up at the end. Programs are many and small, so that all of the GPU reads at once; a wide input is divided among the
threads of a program, and not among programs, whose sums somebody would have to add up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemv_kernel(
    x, weight, bias, out, x_stride, outputs, ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """out [ROWS, outputs] = x [ROWS, INPUTS] @ weight [outputs, INPUTS].T + bias [outputs]. ROWS is 1 to 4.

    Grid: blocks of OUTPUTS outputs, each of which goes through the inputs WIDTH at a time.
    """
    offs_m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    offs_n = tl.arange(0, WIDTH)
    mask_m = offs_m < outputs
    ptrs = weight + offs_m.to(tl.int64)[:, None] * INPUTS + offs_n[None]
    zeros = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    first, second, third, fourth = zeros, zeros, zeros, zeros
    # A piece is read while the one before it is multiplied.
    ahead = tl.load(ptrs, mask=mask_m[:, None] & (offs_n < INPUTS)[None], other=0.0, eviction_policy="evict_first")
    for start in range(0, INPUTS, WIDTH):
        piece = ahead.to(tl.float32)
        later = start + WIDTH + offs_n < INPUTS
        ahead = tl.load(
            ptrs + (start + WIDTH), mask=mask_m[:, None] & later[None], other=0.0, eviction_policy="evict_first"
        )
        mask_n = start + offs_n < INPUTS
        inputs = x + start + offs_n
        first += piece * tl.load(inputs, mask=mask_n, other=0.0).to(tl.float32)[None]
        if ROWS > 1:
            second += piece * tl.load(inputs + x_stride, mask=mask_n, other=0.0).to(tl.float32)[None]
        if ROWS > 2:
            third += piece * tl.load(inputs + 2 * x_stride, mask=mask_n, other=0.0).to(tl.float32)[None]
        if ROWS > 3:
            fourth += piece * tl.load(inputs + 3 * x_stride, mask=mask_n, other=0.0).to(tl.float32)[None]
    added = tl.zeros((OUTPUTS,), tl.float32)
    if bias is not None:
        added = tl.load(bias + offs_m, mask=mask_m, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + offs_m, (tl.sum(first, 1) + added).to(dtype), mask=mask_m)
    if ROWS > 1:
        tl.store(out + outputs + offs_m, (tl.sum(second, 1) + added).to(dtype), mask=mask_m)
    if ROWS > 2:
        tl.store(out + 2 * outputs + offs_m, (tl.sum(third, 1) + added).to(dtype), mask=mask_m)
    if ROWS > 3:
        tl.store(out + 3 * outputs + offs_m, (tl.sum(fourth, 1) + added).to(dtype), mask=mask_m)
