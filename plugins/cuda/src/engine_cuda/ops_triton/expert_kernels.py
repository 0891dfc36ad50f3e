"""Products of tokens with the experts that they chose.

A pair is a token and one of its experts: pair t * k + i is token t's i-th. Where pairs are few, each is computed by
itself, as a product of one row that waits for the matrix to come from memory (`few_first_kernel`, `few_last_kernel`).
Where they are many, they are sorted by expert (`sort_kernel`), and blocks of rows that have one expert in common are
multiplied by tensor cores (`first_kernel`, `last_kernel`, `combine_kernel`). How many blocks there are, only the device
knows: as many programs are launched as there can be at most, each looks up its own block, and those without one end.

A token's terms are added in the order of its experts, in float32, and not by atomic additions, whose order changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.interpreter_shim import INTERPRETED
from engine_cuda.ops_triton.activations import _tanh
from engine_cuda.ops_triton.launching import start_dependent


@triton.jit
def act_of(gate, up, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr):
    """act(gate) * up of float32 numbers, or act(gate) alone; a NaN stays one. See `engine_kit.routing.ExpertAct`."""
    if KIND == "clamped":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = gate / (1.0 + tl.exp(-alpha * gate))
        up += 1.0
    elif KIND == "silu":
        y = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        y = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = gate * 0.5 * (1.0 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        y = tl.where(gate < 0, 0.0, gate)
        if KIND == "relu2":
            y = y * y
    if GATED:
        y = y * up
    return y


@triton.jit
def gated_act_kernel(
    x, out, row_stride, inner, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [T, inner] from x [T, 2 * inner], all gates first, or [T, inner]. Grid: (T, blocks of inner)."""
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < inner
    gate = tl.load(x + token * row_stride + offs_n, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(x + token * row_stride + inner + offs_n, mask=mask, other=0.0).to(tl.float32)
    y = act_of(gate, up, alpha, limit, KIND, GATED)
    tl.store(out + token * inner + offs_n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def row_gate_kernel(
    x, gate, out, x_stride, gate_stride, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """out[t] = x[t] * sigmoid(gate[t]). Grid: (T, blocks of the width)."""
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < width
    by = tl.load(gate + token * gate_stride).to(tl.float32)
    y = tl.load(x + token * x_stride + offs_n, mask=mask, other=0.0).to(tl.float32) / (1.0 + tl.exp(-by))
    tl.store(out + token * width + offs_n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "pairs", "count"])
def place_kernel(
    ids, table, load, out, first, pairs, count, TOP_K: tl.constexpr, REPLICAS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [pairs] = the place of each expert, less `first`, or `count`; load [count] counts them. Grid: blocks of
    pairs."""
    start_dependent(DEPENDENT)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    expert = tl.load(ids + pair, mask=mask, other=0).to(tl.int64)
    place = tl.load(table + expert * REPLICAS + pair // TOP_K % REPLICAS, mask=mask, other=0) - first
    here = (place >= 0) & (place < count) & mask
    tl.atomic_add(load + place, tl.full((BLOCK,), 1, tl.int64), mask=here, sem="relaxed")
    tl.store(out + pair, tl.where(here, place, count), mask=mask)


# -- few pairs -----------------------------------------------------------------------------------------------------
@triton.jit
def few_first_kernel(
    x, weight, bias, ids, out, x_stride, inner, experts, alpha, limit, TOP_K: tl.constexpr, INPUTS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [pairs, inner] = act(weight[expert] @ x[token] + bias[expert]). Grid: (blocks of OUTPUTS, pairs).

    weight [E, 2 * inner, INPUTS] with all gates first, or [E, inner, INPUTS]; bias [E, ...] or None.
    """
    start_dependent(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    offs_m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    offs_n = tl.arange(0, WIDTH)
    mask_m = (offs_m < inner) & (expert < experts)  # nobody's are left as they are
    rows = expert * inner * (1 + GATED) + offs_m
    ptrs = weight + rows[:, None] * INPUTS + offs_n[None]
    inputs = x + pair // TOP_K * x_stride + offs_n
    first = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    second = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    # A piece is read while the one before it is multiplied.
    mask = mask_m[:, None] & (offs_n < INPUTS)[None]
    gate_ahead = tl.load(ptrs, mask=mask, other=0.0)
    up_ahead = gate_ahead
    if GATED:
        up_ahead = tl.load(ptrs + inner.to(tl.int64) * INPUTS, mask=mask, other=0.0)
    for start in range(0, INPUTS, WIDTH):
        gate = gate_ahead.to(tl.float32)
        up = up_ahead.to(tl.float32)
        later = mask_m[:, None] & (start + WIDTH + offs_n < INPUTS)[None]
        gate_ahead = tl.load(ptrs + (start + WIDTH), mask=later, other=0.0)
        if GATED:
            up_ahead = tl.load(ptrs + inner.to(tl.int64) * INPUTS + (start + WIDTH), mask=later, other=0.0)
        piece = tl.load(inputs + start, mask=start + offs_n < INPUTS, other=0.0).to(tl.float32)
        first += gate * piece[None]
        if GATED:
            second += up * piece[None]
    gates, ups = tl.sum(first, 1), tl.sum(second, 1)
    if bias is not None:
        gates += tl.load(bias + rows, mask=mask_m, other=0.0).to(tl.float32)
        if GATED:
            ups += tl.load(bias + rows + inner, mask=mask_m, other=0.0).to(tl.float32)
    y = act_of(gates, ups, alpha, limit, KIND, GATED)
    tl.store(out + pair * inner + offs_m, y.to(out.dtype.element_ty), mask=mask_m)


@triton.jit
def few_last_kernel(
    x, weight, bias, ids, by, out, outputs, experts, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over i of by[t, i] * (weight[expert] @ x[t * k + i] + bias[expert]). Grid: (blocks of OUTPUTS, T).

    All experts of a token are read side by side. weight [E, outputs, INPUTS], bias [E, outputs] or None.
    """
    start_dependent(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    offs_k = tl.arange(0, PADDED_K)
    offs_n = tl.arange(0, WIDTH)
    mask_k = offs_k < TOP_K
    pairs = token * TOP_K + offs_k
    chosen = tl.load(ids + pairs, mask=mask_k, other=0).to(tl.int64)
    mask_k = mask_k & (chosen < experts)
    factors = tl.load(by + pairs, mask=mask_k, other=0.0).to(tl.float32)
    rows = chosen[None] * outputs + offs_m[:, None]
    mask_m = (offs_m < outputs)[:, None] & mask_k[None]
    ptrs = weight + rows[:, :, None] * INPUTS + offs_n[None, None]
    inputs = x + pairs[:, None] * INPUTS + offs_n[None]
    total = tl.zeros((OUTPUTS, PADDED_K, WIDTH), tl.float32)
    ahead = tl.load(ptrs, mask=mask_m[:, :, None] & (offs_n < INPUTS)[None, None], other=0.0)
    for start in range(0, INPUTS, WIDTH):
        piece = ahead.to(tl.float32)
        later = start + WIDTH + offs_n < INPUTS
        ahead = tl.load(ptrs + (start + WIDTH), mask=mask_m[:, :, None] & later[None, None], other=0.0)
        mask_n = start + offs_n < INPUTS
        given = tl.load(inputs + start, mask=mask_k[:, None] & mask_n[None], other=0.0).to(tl.float32)
        total += piece * given[None]
    terms = tl.sum(total, 2)
    if bias is not None:
        terms += tl.load(bias + rows, mask=mask_m, other=0.0).to(tl.float32)
    # Where a weight is 0 (padding) its term is 0 too: the tile has zeros there.
    y = tl.sum(terms * factors[None], 1)
    tl.store(out + token * outputs + offs_m, y.to(out.dtype.element_ty), mask=offs_m < outputs)


# -- many pairs ----------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(ids, order, starts, pairs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """order [pairs]: the pairs sorted by expert, and among equals by number; starts [E + 1]: where those of each expert
    begin, and nobody's. Grid: experts and nobody, each of which reads all ids [pairs], twice."""
    start_dependent(DEPENDENT)
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(ids + start + offs, mask=start + offs < pairs, other=expert)
        below += (chosen < expert).to(tl.int32)
    place = tl.sum(below, 0)
    tl.store(starts + expert, place)
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(ids + start + offs, mask=start + offs < pairs, other=-1)
        here = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(here, 0)
        tl.store(order + place + rank - 1, start + offs, mask=here > 0)
        place += tl.sum(here, 0)


@triton.jit
def _block_of(starts, block, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """(expert, its first row, the end of the expert's rows) of a block of at most ROWS sorted rows; of a block that
    there is not, PADDED and no row."""
    offs = tl.arange(0, PADDED)
    begin = tl.load(starts + offs, mask=offs < EXPERTS, other=0)
    end = tl.load(starts + offs + 1, mask=offs < EXPERTS, other=0)
    blocks = (end - begin + ROWS - 1) // ROWS
    upto = tl.cumsum(blocks, 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    here = offs == expert
    first = tl.sum(tl.where(here, begin + (block - upto + blocks) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def _tile_of(blocks, tiles, GROUP: tl.constexpr):
    """(block of rows, tile of outputs) of this program: GROUP blocks have a tile, and then the next, so that programs
    that run together read few rows and few weights."""
    program = tl.program_id(0)
    group = program // (GROUP * tiles)
    wide = tl.minimum(blocks - group * GROUP, GROUP)
    return group * GROUP + program % (GROUP * tiles) % wide, program % (GROUP * tiles) // wide


@triton.jit
def _multiply(rows, weights, total):
    """total + rows @ weights.T; the interpreter has no products of bfloat16."""
    if INTERPRETED:
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    return tl.dot(rows, tl.trans(weights), total, input_precision="ieee")


@triton.jit(do_not_specialize=["blocks"])
def first_kernel(
    x, weight, bias, order, starts, out, x_stride, blocks, alpha, limit, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, INPUTS: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [pairs, INNER], in sorted order, = act(weight[expert] @ x[token] + bias[expert]). Grid: blocks of rows by
    tiles of OUTPUTS outputs, of each of which a program has the gates and what they gate."""
    start_dependent(DEPENDENT)
    block, tile = _tile_of(blocks, (INNER + OUTPUTS - 1) // OUTPUTS, GROUP)
    expert, first, end = _block_of(starts, block, EXPERTS, PADDED, ROWS)
    if expert < EXPERTS:
        offs_m = first + tl.arange(0, ROWS)
        offs_n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        offs_k = tl.arange(0, WIDTH)
        mask_m, mask_n = offs_m < end, offs_n < INNER
        tokens = (tl.load(order + offs_m, mask=mask_m, other=0) // TOP_K).to(tl.int64)
        outputs = expert.to(tl.int64) * (INNER * (1 + GATED)) + offs_n
        x_ptrs = x + tokens[:, None] * x_stride + offs_k[None]
        w_ptrs = weight + outputs[:, None] * INPUTS + offs_k[None]
        gates = tl.zeros((ROWS, OUTPUTS), tl.float32)
        ups = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, INPUTS, WIDTH):
            mask_k = (start + offs_k < INPUTS)[None]
            rows = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k, other=0.0)
            mask_w = mask_n[:, None] & mask_k
            gates = _multiply(rows, tl.load(w_ptrs + start, mask=mask_w, other=0.0), gates)
            if GATED:
                ups = _multiply(rows, tl.load(w_ptrs + (INNER * INPUTS + start), mask=mask_w, other=0.0), ups)
        if bias is not None:
            gates += tl.load(bias + outputs, mask=mask_n, other=0.0).to(tl.float32)[None]
            if GATED:
                ups += tl.load(bias + outputs + INNER, mask=mask_n, other=0.0).to(tl.float32)[None]
        y = act_of(gates, ups, alpha, limit, KIND, GATED)
        ptrs = out + offs_m.to(tl.int64)[:, None] * INNER + offs_n[None]
        tl.store(ptrs, y.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None])


@triton.jit(do_not_specialize=["blocks"])
def last_kernel(
    x, weight, bias, order, starts, out, blocks, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    INPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [pairs, SIZE], in the order of pairs, = weight[expert] @ x[sorted row] + bias[expert]. Grid: as above."""
    start_dependent(DEPENDENT)
    block, tile = _tile_of(blocks, (SIZE + OUTPUTS - 1) // OUTPUTS, GROUP)
    expert, first, end = _block_of(starts, block, EXPERTS, PADDED, ROWS)
    if expert < EXPERTS:
        offs_m = first + tl.arange(0, ROWS)
        offs_n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        offs_k = tl.arange(0, WIDTH)
        mask_m, mask_n = offs_m < end, offs_n < SIZE
        outputs = expert.to(tl.int64) * SIZE + offs_n
        x_ptrs = x + offs_m.to(tl.int64)[:, None] * INPUTS + offs_k[None]
        w_ptrs = weight + outputs[:, None] * INPUTS + offs_k[None]
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, INPUTS, WIDTH):
            mask_k = (start + offs_k < INPUTS)[None]
            rows = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k, other=0.0)
            total = _multiply(rows, tl.load(w_ptrs + start, mask=mask_n[:, None] & mask_k, other=0.0), total)
        if bias is not None:
            total += tl.load(bias + outputs, mask=mask_n, other=0.0).to(tl.float32)[None]
        places = tl.load(order + offs_m, mask=mask_m, other=0).to(tl.int64)
        ptrs = out + places[:, None] * SIZE + offs_n[None]
        tl.store(ptrs, total.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None])


@triton.jit
def combine_kernel(
    terms, by, ids, out, width, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """out[t] = sum over i of by[t, i] * terms[t * k + i]. Grid: (T, blocks of the width)."""
    start_dependent(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        here = mask & (tl.load(ids + pair) < experts)
        term = tl.load(terms + pair * width + offs_n, mask=here, other=0.0).to(tl.float32)
        total += tl.load(by + pair).to(tl.float32) * term
    tl.store(out + token * width + offs_n, total.to(out.dtype.element_ty), mask=mask)
