"""The product of a few rows with a matrix, which waits for the matrix to come from memory; with the norm before it and
what is done to its results.

Each element of the matrix is used once for each row, so tensor cores have nothing to do: a program reads some of the
matrix's rows from end to end, in pieces of 16 bytes a thread, multiplies them with the inputs in float32, and adds up
at the end. All pieces of a block are asked for at once, before anything is computed, and with them those of the
program's next block. The inputs, normed or not, are read once and stay in registers.

Launched as a dependent (`launch_pdl`), a program starts while the kernel before still runs: the matrix comes from no
kernel, so its first block is on its way by the time that kernel has ended. Only what a kernel wrote waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.ops_triton.launching import start_dependent


@triton.jit(do_not_specialize=("num_rows",))
def few_rows_kernel(
    x, norm, weight, bias, residual, out, x_stride, residual_stride, outputs, num_rows, eps, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y = n @ weight [outputs, INPUTS].T + bias, with n = x [num_rows, INPUTS], or its RMS norm where `norm` is given.

    out: y [num_rows, outputs]; with a residual y + residual; where GATED silu(y[:, :outputs / 2]) * y[:, outputs / 2:].
    Everything is rounded where the operations one after the other round it. ROWS is 1, 2 or 4: the rows, up to a
    power of two; of three the last is computed twice and stored once.

    Grid: blocks of OUTPUTS outputs, gates and what they multiply in turn where GATED; unless ONCE fewer programs, each
    of which takes one block after another. Inputs lie in pieces of WIDTH.
    """
    PIECES: tl.constexpr = (INPUTS + WIDTH - 1) // WIDTH
    pieces = _block(weight, tl.program_id(0), outputs, INPUTS, OUTPUTS, WIDTH, PIECES, GATED)
    factors = None if norm is None else _row(norm, INPUTS, WIDTH, PIECES)
    start_dependent(DEPENDENT)
    first = _inputs(x, factors, eps, INPUTS, WIDTH, PIECES)
    second, third, fourth = first, first, first
    if ROWS > 1:
        second = _inputs(x + x_stride, factors, eps, INPUTS, WIDTH, PIECES)
    if ROWS > 2:
        third = _inputs(x + 2 * x_stride, factors, eps, INPUTS, WIDTH, PIECES)
    if ROWS > 3:
        fourth = _inputs(x + (num_rows - 1) * x_stride, factors, eps, INPUTS, WIDTH, PIECES)
    rows = (first, second, third, fourth)
    if ONCE:
        _results(
            tl.program_id(0), pieces, rows, bias, residual, residual_stride, out, outputs, num_rows, ROWS, OUTPUTS,
            PIECES, GATED,
        )  # fmt: skip
    else:
        for block in range(tl.program_id(0), tl.cdiv(outputs, OUTPUTS), tl.num_programs(0)):
            now = pieces
            pieces = _block(weight, block + tl.num_programs(0), outputs, INPUTS, OUTPUTS, WIDTH, PIECES, GATED)
            _results(
                block, now, rows, bias, residual, residual_stride, out, outputs, num_rows, ROWS, OUTPUTS, PIECES, GATED
            )


@triton.jit
def _results(
    block, pieces, rows, bias, residual, residual_stride, out, outputs, num_rows, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """All rows' results of a block."""
    offs_m = _outputs(block, outputs, OUTPUTS, GATED)
    added = tl.zeros((OUTPUTS,), tl.float32)
    if bias is not None:
        added = tl.load(bias + offs_m, mask=offs_m < outputs, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        y = (_sums(pieces, rows[row], PIECES) + added).to(out.dtype.element_ty)
        if GATED:
            gate, up = tl.split(tl.reshape(y.to(tl.float32), (OUTPUTS // 2, 2)))
            offs = block * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
            acted = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
            mask = offs < outputs // 2
            if row == 3:
                mask = mask & (num_rows > 3)
            tl.store(out + row * (outputs // 2) + offs, acted, mask=mask)
        else:
            mask = offs_m < outputs
            if row == 3:
                mask = mask & (num_rows > 3)
            if residual is not None:
                before = tl.load(residual + row * residual_stride + offs_m, mask=mask, other=0.0)
                y = (y.to(tl.float32) + before.to(tl.float32)).to(out.dtype.element_ty)
            tl.store(out + row * outputs + offs_m, y, mask=mask)


@triton.jit
def _outputs(block, outputs, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The matrix's rows of a block."""
    offs_m = block * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        offs_m = tl.where(offs_m < outputs, offs_m // 2 + offs_m % 2 * (outputs // 2), outputs)
    return offs_m


@triton.jit
def _block(
    weight, block, outputs, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """A block's part of the matrix: PIECES of [OUTPUTS, WIDTH]; nothing is read of a block that does not exist."""
    offs_m, offs_n = _outputs(block, outputs, OUTPUTS, GATED), tl.arange(0, WIDTH)
    ptrs = weight + offs_m.to(tl.int64)[:, None] * INPUTS + offs_n[None]
    mask = (offs_m < outputs)[:, None]
    pieces = ()
    for piece in tl.static_range(PIECES):
        within = mask
        if (piece + 1) * WIDTH > INPUTS:
            within = mask & (piece * WIDTH + offs_n < INPUTS)[None]
        part = tl.load(ptrs + piece * WIDTH, mask=within, other=0.0, eviction_policy="evict_first")
        pieces += (part,)  # type: ignore[assignment]
    return pieces


@triton.jit
def _row(x, INPUTS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """A row of inputs: PIECES of [WIDTH]."""
    offs_n = tl.arange(0, WIDTH)
    pieces = ()
    for piece in tl.static_range(PIECES):
        part = tl.load(x + piece * WIDTH + offs_n, mask=piece * WIDTH + offs_n < INPUTS, other=0.0)
        pieces += (part,)  # type: ignore[assignment]
    return pieces


@triton.jit
def _inputs(x, factors, eps, INPUTS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """A row of inputs, or its norm, whose weight `factors` is: PIECES of [WIDTH]."""
    pieces = _row(x, INPUTS, WIDTH, PIECES)
    if factors is not None:
        squares = tl.zeros((WIDTH,), tl.float32)
        for piece in tl.static_range(PIECES):
            squares += pieces[piece].to(tl.float32) * pieces[piece].to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        normed = ()
        for piece in tl.static_range(PIECES):
            # Rounded before the weight is applied, as the reference does.
            rounded = (pieces[piece].to(tl.float32) * scale).to(x.dtype.element_ty).to(tl.float32)
            part = (rounded * factors[piece].to(tl.float32)).to(x.dtype.element_ty)
            normed += (part,)  # type: ignore[assignment]
        pieces = normed
    return pieces


@triton.jit
def _sums(pieces, inputs, PIECES: tl.constexpr):
    """The products of a block with a row: [OUTPUTS]."""
    total = pieces[0].to(tl.float32) * inputs[0].to(tl.float32)[None]
    for piece in tl.static_range(1, PIECES):
        total += pieces[piece].to(tl.float32) * inputs[piece].to(tl.float32)[None]
    return tl.sum(total, 1)
