"""The kernels of the block-sparse attention: a program walks the blocks that its queries see, and no other.

Its blocks are counted, not looked up: the first ones, then every n-th, then those from the first local block of its
first query to the own block of its last one. Online softmax over tiles of keys (FlashAttention, Dao et al. 2022) with
exponentials of base 2. The blocks of a decode are divided among programs where there are few rows (FlashDecoding, Dao
et al. 2023); `join_kernel` puts the parts together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class SparseForm(NamedTuple):
    """What a launch is compiled for: one constexpr of the kernel.

    Args:
        KV_HEADS: of this rank. GROUP: query heads of a KV head. PACKED: of them in one program.
        HEAD_SIZE: elements of a head; BLOCK_D: up to a power of two.
        PAGE: tokens of a page.
        BLOCK_M: rows of a tile, which are queries, and within each the heads that share a KV head. BLOCK_N: its keys.
        BLOCK, LOCAL, STRIDE, SINKS: see `Pattern`; SHIFTS: heads see different blocks, and PACKED is 1.
        ONE: a unit is one query, and row r is token r.
        SPLITS: programs that share a unit's blocks.
        LSE: it is wanted. WIDEN: compute in float32.
    """

    KV_HEADS: int
    GROUP: int
    PACKED: int
    HEAD_SIZE: int
    BLOCK_D: int
    PAGE: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK: int
    LOCAL: int
    STRIDE: int
    SINKS: int
    SHIFTS: bool
    ONE: bool
    SPLITS: int
    LSE: bool
    WIDEN: bool


@triton.jit(do_not_specialize=("first_head", "head_step"))
def block_sparse_kernel(
    out,  # [T, Hq, D]; with SPLITS the parts, float32 [SPLITS, T, Hq, D]
    lse,  # float32 [T, Hq], or None; with SPLITS [SPLITS, T, Hq]
    q,  # [T, Hq, D]
    cache,  # of keys and of values: views of one pool, with the same strides
    step,  # block table int32 [R, blocks], kv_index int64 [T], units int32 [n, 3] (row, token, tokens), None for ONE
    scale,  # by log2(e)
    first_head,  # of this rank, see `Pattern.shift`
    head_step,
    out_strides,  # split, token, head
    lse_strides,
    q_strides,  # token, head
    cache_strides,  # page, head, token
    table_stride,
    FORM: tl.constexpr,  # `SparseForm`
):
    """Program (p, s): part s of unit p // heads for PACKED query heads, p % heads."""
    GROUP: tl.constexpr = FORM.GROUP
    PACKED: tl.constexpr = FORM.PACKED
    PARTS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    HEADS: tl.constexpr = FORM.KV_HEADS * PARTS
    BLOCK: tl.constexpr = FORM.BLOCK
    STRIDE: tl.constexpr = FORM.STRIDE
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    TILES: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N  # of a block
    table, kv_index, units = step
    unit, head, split = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    kv_head, part = head // PARTS, head % PARTS
    if FORM.ONE:
        row, token, num_queries = unit, unit, 1
    else:
        units += unit * 3
        row, token, num_queries = tl.load(units), tl.load(units + 1), tl.load(units + 2)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query, within = offs_m // PACKED, part * PACKED + offs_m % PACKED
    mask_m = (query < num_queries) & (within < GROUP)
    q_head = kv_head * GROUP + within
    offs_t = (token + query).to(tl.int64)
    mask = mask_m[:, None] & (offs_d < FORM.HEAD_SIZE)[None]
    q_ptrs = q + offs_t * q_strides[0] + q_head * q_strides[1]
    queries = tl.load(q_ptrs[:, None] + offs_d[None], mask=mask, other=0.0)
    if FORM.WIDEN:
        queries = queries.to(tl.float32)
    positions = tl.load(kv_index + offs_t, mask=mask_m, other=-1).to(tl.int32)
    highest = tl.max(positions, 0)
    lowest = tl.min(tl.where(positions >= 0, positions, highest), 0)
    own = positions // BLOCK

    # Of these queries' blocks: the first `sinks`, then `strided`, and all from `near` on.
    shift = 0
    if FORM.SHIFTS:
        shift = (first_head + kv_head * GROUP + part) * head_step % STRIDE
    near = tl.maximum(0, lowest // BLOCK - FORM.LOCAL + 1)
    sinks = tl.minimum(FORM.SINKS, near)
    strided, strides_before = 0, 0
    if STRIDE > 0:
        strides_before = (sinks + shift) // STRIDE
        strided = tl.maximum(0, (near + shift) // STRIDE - strides_before)
    tiles = tl.where(highest < 0, 0, (sinks + strided + highest // BLOCK - near + 1) * TILES)
    each = (tiles + FORM.SPLITS - 1) // FORM.SPLITS

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    k = cache[0] + kv_head.to(tl.int64) * cache_strides[1]
    v = cache[1] + kv_head.to(tl.int64) * cache_strides[1]
    table += row.to(tl.int64) * table_stride
    for tile in tl.range(split * each, tl.minimum(tiles, (split + 1) * each)):
        number = tile // TILES
        block = tl.where(number < sinks, number, near + number - sinks - strided)
        seen = (own - block < FORM.LOCAL) | (block < FORM.SINKS)
        if STRIDE > 0:
            far = (strides_before + number - sinks + 1) * STRIDE - 1 - shift
            block = tl.where((number >= sinks) & (number < sinks + strided), far, block)
            seen = (own - block < FORM.LOCAL) | (block < FORM.SINKS) | ((block + 1 + shift) % STRIDE == 0)
        inside = tile % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_n = block * BLOCK + inside
        mask_n = (inside < BLOCK) & (offs_n <= highest)
        page = tl.load(table + offs_n // FORM.PAGE, mask=mask_n, other=0)
        offs = page.to(tl.int64) * cache_strides[0] + offs_n % FORM.PAGE * cache_strides[2]
        mask_kv = mask_n[:, None] & (offs_d < FORM.HEAD_SIZE)[None]
        # What is not there is read as 0: 0 * NaN is NaN.
        keys = tl.load(k + offs[:, None] + offs_d[None], mask=mask_kv, other=0.0)
        values = tl.load(v + offs[:, None] + offs_d[None], mask=mask_kv, other=0.0)
        if FORM.WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        else:
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        qk = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        qk = tl.where(mask_n[None] & seen[:, None] & (offs_n[None] <= positions[:, None]), qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        base = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        p = tl.exp2(qk - base[:, None])
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij

    l_i = tl.where(m_i == float("-inf"), 1.0, l_i)  # it sees nothing
    acc = acc / l_i[:, None]
    out_ptrs = out + split.to(tl.int64) * out_strides[0] + offs_t * out_strides[1] + q_head * out_strides[2]
    tl.store(out_ptrs[:, None] + offs_d[None], acc.to(out.dtype.element_ty), mask=mask)
    if FORM.LSE:
        lse_ptrs = lse + split.to(tl.int64) * lse_strides[0] + offs_t * lse_strides[1] + q_head * lse_strides[2]
        tl.store(lse_ptrs, (m_i + tl.log2(l_i)) / 1.4426950408889634, mask=mask_m)


@triton.jit
def join_kernel(
    out,  # [T, Hq, D]
    lse,  # float32 [T, Hq], or None
    parts,  # float32 [SPLITS, T, Hq, D]
    sums,  # float32 [SPLITS, T, Hq]
    out_strides,  # token, head
    lse_strides,
    part_strides,  # split, token, head
    sum_strides,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Program (t, h): the means of the parts, by their sums."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, offs_d = tl.arange(0, SPLITS).to(tl.int64), tl.arange(0, BLOCK_D)
    sum_of = tl.load(sums + split * sum_strides[0] + token * sum_strides[1] + head * sum_strides[2])
    top = tl.max(sum_of, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(sum_of - top)
    total = tl.sum(weights, 0)
    ptrs = parts + split * part_strides[0] + token * part_strides[1] + head * part_strides[2]
    mask_d = offs_d < HEAD_SIZE
    found = tl.load(ptrs[:, None] + offs_d[None], mask=mask_d[None], other=0.0)
    mean = tl.sum(found * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + token * out_strides[0] + head * out_strides[1] + offs_d, mean.to(out.dtype.element_ty), mask=mask_d)
    if LSE:
        tl.store(lse + token * lse_strides[0] + head * lse_strides[1], top + tl.log(total))
