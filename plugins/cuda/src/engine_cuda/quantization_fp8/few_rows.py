"""The product of a few rows with weights of 8 bits, which waits for the weights to come from memory.

Tensor cores have nothing to do here, so nothing is gained by rounding the rows: they stay in their own type, which is
more exact and a launch less. A program reads some outputs' weights from end to end as they are stored, 16 of them a
thread at a time, multiplies in float32, and puts scales and bias on the sums. A thread's 16 products of one output are
added up at once, so what it carries along is one sum for each output and row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton.launching import power_of_2

INTERPRETED = interpreted()
WARPS = 4
VECTOR = 16
"""Weights that a thread reads at once: 16 bytes."""
OUTPUTS = 4
"""Of a program. A thread has the same inputs of all of them, so it reads a row's inputs once for four weights."""
WIDTH = WARPS * 32 * VECTOR
"""Inputs that a program takes at a time: one piece of 16 for each thread. So 8 KB are read ahead while as many are
multiplied, and three or four programs fit a multiprocessor: 24 to 32 KB in flight, what an H200's memory wants."""
PROGRAMS = 264
"""At least so many, two for each multiprocessor of an H200: else blocks of fewer outputs."""


@triton.jit
def _sums(piece, inputs, mask_n, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """[OUTPUTS, WIDTH // VECTOR]: products of a piece with a row's inputs, each thread's own added up."""
    row = tl.load(inputs, mask=mask_n, other=0.0).to(tl.float32)
    return tl.sum(tl.reshape(piece * row[None], (OUTPUTS, WIDTH // VECTOR, VECTOR)), 2)


@triton.jit(do_not_specialize=("rows",))
def few_rows_kernel(
    x, codes, scales, bias, out, x_stride, outputs, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs] = x [rows, COLUMNS] @ (scales * codes [.., INPUTS]).T + bias. ROWS is 1, 2 or 4: rows, up
    to a power of two; of three the last is computed twice and stored once.

    Grid: blocks of OUTPUTS outputs, each of which goes through the inputs WIDTH at a time; codes behind x's columns are
    zeros.
    """
    offs_m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    offs_n = tl.arange(0, WIDTH)
    mask_m = offs_m < outputs
    ptrs = codes + offs_m.to(tl.int64)[:, None] * INPUTS + offs_n[None]
    first = tl.zeros((OUTPUTS, WIDTH // VECTOR), tl.float32)
    second, third, fourth = first, first, first
    # A piece is read while the one before it is multiplied.
    ahead = tl.load(ptrs, mask=mask_m[:, None] & (offs_n < INPUTS)[None], other=0.0, eviction_policy="evict_first")
    for start in range(0, INPUTS, WIDTH):
        piece = ahead.to(tl.float32)
        later = start + WIDTH + offs_n < INPUTS
        ahead = tl.load(
            ptrs + (start + WIDTH), mask=mask_m[:, None] & later[None], other=0.0, eviction_policy="evict_first"
        )
        mask_n = start + offs_n < COLUMNS
        inputs = x + start + offs_n
        first += _sums(piece, inputs, mask_n, OUTPUTS, WIDTH, VECTOR)
        if ROWS > 1:
            second += _sums(piece, inputs + x_stride, mask_n, OUTPUTS, WIDTH, VECTOR)
        if ROWS > 2:
            third += _sums(piece, inputs + 2 * x_stride, mask_n, OUTPUTS, WIDTH, VECTOR)
        if ROWS > 3:
            fourth += _sums(piece, inputs + (rows - 1) * x_stride, mask_n, OUTPUTS, WIDTH, VECTOR)
    scale = tl.load(scales + offs_m, mask=mask_m, other=0.0)
    added = tl.zeros((OUTPUTS,), tl.float32)
    if bias is not None:
        added = tl.load(bias + offs_m, mask=mask_m, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + offs_m, (tl.sum(first, 1) * scale + added).to(dtype), mask=mask_m)
    if ROWS > 1:
        tl.store(out + outputs + offs_m, (tl.sum(second, 1) * scale + added).to(dtype), mask=mask_m)
    if ROWS > 2:
        tl.store(out + 2 * outputs + offs_m, (tl.sum(third, 1) * scale + added).to(dtype), mask=mask_m)
    if ROWS > 3:
        tl.store(out + 3 * outputs + offs_m, (tl.sum(fourth, 1) * scale + added).to(dtype), mask=mask_m & (rows > 3))


def blocks(outputs: int, inputs: int) -> tuple[int, int]:
    """(outputs of a program, inputs that it takes at a time)."""
    block = OUTPUTS
    while block > 1 and triton.cdiv(outputs, block) < PROGRAMS:
        block //= 2
    return block, min(WIDTH, triton.next_power_of_2(inputs))


def few_rows(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    """x [T, I], T from 1 to 4 -> [T, outputs] in x's dtype. One launch.

    Args:
        codes: e4m3 [padded outputs, padded inputs], contiguous; padded inputs are a multiple of 16.
        scales: float32, padded outputs of them.
        bias: [padded outputs].
    """
    rows, columns = x.shape
    if x.stride(1) != 1 and columns > 1:
        x = x.contiguous()
    inputs = codes.shape[1]
    out = x.new_empty(rows, outputs)
    block, width = blocks(outputs, inputs)
    if INTERPRETED:  # it takes as long for one output as for many
        block = 512
    few_rows_kernel[(triton.cdiv(outputs, block),)](
        x, codes, scales, bias, out, x.stride(0), outputs, rows, power_of_2(rows), columns, inputs, block, width,
        VECTOR, num_warps=WARPS,
    )  # fmt: skip
    return out
