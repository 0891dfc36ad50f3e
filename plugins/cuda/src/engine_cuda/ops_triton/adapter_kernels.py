"""The kernels of adapters: A x of each adapter's tokens, sorted by adapter, and then what B gives, added to outputs.

Both begin with a block of one place's tokens; how many a place has is read when they run, and blocks beyond do nothing,
so that a captured step may have any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.interpreter_shim import INTERPRETED
from engine_cuda.ops_triton.launching import start_dependent


@triton.jit
def _product(rows, weights, total):
    """total + rows @ weights.T; the interpreter multiplies no bfloat16."""
    if INTERPRETED:
        return total + tl.dot(rows.to(tl.float32), tl.trans(weights.to(tl.float32)), input_precision="ieee")
    return tl.dot(rows, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def shrink_kernel(
    x,
    a,
    inner,
    tokens,
    starts,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """inner [n, PARTS, RANK] = A x: a [places + 1, PARTS, RANK, INPUTS]; programs: blocks of tokens, places, parts."""
    start_dependent(DEPENDENT)
    place = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(starts + place) + tl.program_id(0) * ROWS
    end = tl.load(starts + place + 1)
    if first < end:
        offs = first + tl.arange(0, ROWS)
        there = offs < end
        token = tl.load(tokens + offs, mask=there, other=0).to(tl.int64)
        ranks = tl.arange(0, RANK)
        matrix = a + ((place + 1).to(tl.int64) * PARTS + part) * RANK * INPUTS
        total = tl.zeros((ROWS, RANK), tl.float32)
        for begin in range(0, INPUTS, WIDTH):
            columns = begin + tl.arange(0, WIDTH)
            inside = columns < INPUTS
            rows = tl.load(x + token[:, None] * x_stride + columns, mask=there[:, None] & inside, other=0.0)
            weights = tl.load(matrix + ranks[:, None] * INPUTS + columns, mask=inside[None, :], other=0.0)
            total = _product(rows, weights, total)
        to = inner + (offs.to(tl.int64)[:, None] * PARTS + part) * RANK + ranks
        tl.store(to, total.to(inner.dtype.element_ty), mask=there[:, None])


@triton.jit
def expand_kernel(
    inner,
    b,
    y,
    tokens,
    starts,
    y_stride,
    part,
    column,
    size,
    outputs,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[token, column + i] += B[i] inner: b [places + 1, outputs, RANK], of which a part's rows are column .. column +
    size - 1; programs: blocks of tokens, places, blocks of the part's outputs."""
    start_dependent(DEPENDENT)
    place = tl.program_id(1)
    first = tl.load(starts + place) + tl.program_id(0) * ROWS
    end = tl.load(starts + place + 1)
    if first < end:
        offs = first + tl.arange(0, ROWS)
        there = offs < end
        token = tl.load(tokens + offs, mask=there, other=0).to(tl.int64)
        own = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = own < size
        terms = inner + (offs.to(tl.int64)[:, None] * PARTS + part) * RANK
        matrix = b + ((place + 1).to(tl.int64) * outputs + column + own[:, None]) * RANK
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, RANK, STEP):
            ranks = begin + tl.arange(0, STEP)
            rows = tl.load(terms + ranks, mask=there[:, None], other=0.0)
            weights = tl.load(matrix + ranks, mask=inside[:, None], other=0.0)
            total = _product(rows, weights, total)
        to = y + token[:, None] * y_stride + column + own
        mask = there[:, None] & inside
        before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (before + total).to(y.dtype.element_ty), mask=mask)
