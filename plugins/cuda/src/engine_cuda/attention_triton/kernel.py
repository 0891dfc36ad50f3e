"""The attention kernel: one program computes a unit of queries, packed with the query heads that share a KV head, over
a chunk of its keys. What its programs do says `items`.

Online softmax over tiles of keys (FlashAttention, Dao et al. 2022 and 2023), with exponentials of base 2. The last
chunk of a unit to finish puts the partial results together (as Stream-K does, Osama et al. 2023), in the same order
whoever it is, so that there is one launch and the result does not depend on timing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine_cuda.attention_triton.items import FIELDS, ones
from engine_cuda.ops_triton.launching import start_dependent

LOG2E = 1.4426950408889634


class Form(NamedTuple):
    """What a launch is compiled for: one constexpr of the kernel.

    Args:
        KV_HEADS: of this rank. GROUP: query heads of a KV head. PACKED: of them in one program.
        HEAD_SIZE: elements of a head; BLOCK_D: up to a power of two.
        PAGE: tokens of a page.
        BLOCK_M: rows of a tile, which are queries, and within each the heads that share a KV head. BLOCK_N: its keys.
        ONE: a unit is one query. SHORT: rows of few tokens.
        CACHED: keys and values are the cache's; else this step's.
        WINDOW, CAP, SINKS, ALIBI, LSE: what there is. TREE: queries may not see all keys before them.
        FUSED: scores need no more than the scale, which goes into the exponential.
        WIDEN: compute in float32.
        FIELDS: int32 of an item.
        DEPENDENT: launched so, see `engine_cuda.dependents`.
    """

    KV_HEADS: int
    GROUP: int
    PACKED: int
    HEAD_SIZE: int
    BLOCK_D: int
    PAGE: int
    BLOCK_M: int
    BLOCK_N: int
    ONE: bool
    SHORT: bool
    CACHED: bool
    WINDOW: bool
    CAP: bool
    SINKS: bool
    ALIBI: bool
    LSE: bool
    TREE: bool
    FUSED: bool
    WIDEN: bool
    FIELDS: int = FIELDS
    DEPENDENT: bool = False


@triton.jit
def _pages(table, start_n, first, last, FORM: tl.constexpr):
    """The pages of a tile's keys; one where a tile lies within a page. Of keys that are not there, the null page."""
    PAGE: tl.constexpr = FORM.PAGE
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    if not FORM.CACHED:
        return start_n
    elif PAGE % BLOCK_N == 0:
        return tl.load(table + start_n // PAGE, mask=start_n < last, other=0)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        block = start_n // PAGE + offs_n // PAGE if BLOCK_N % PAGE == 0 else (start_n + offs_n) // PAGE
        return tl.load(table + block, mask=(start_n + offs_n >= first) & (start_n + offs_n < last), other=0)


@triton.jit
def _span(
    acc, m_i, l_i, queries, cached, strides, scores, begin, end, first, last, MASKED: tl.constexpr, FORM: tl.constexpr
):
    """Take in the keys begin .. end - 1, a tile at a time; MASKED: not all of them are seen by all queries.

    queries: (q [BLOCK_M, BLOCK_D], their places, their slopes, their bits and positions, see `AttentionBatch`; without
    trees both are places). cached: (k, v, the row's block table, the row's first token). strides: of keys and values:
    page, token of k, token of v. scores: (scale, cap, window).
    """
    PAGE: tl.constexpr = FORM.PAGE
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    PADDED: tl.constexpr = FORM.HEAD_SIZE < FORM.BLOCK_D
    q, positions, slope, hidden, counted = queries
    k, v, table, base = cached
    stride_page, stride_k, stride_v = strides
    scale, cap, window = scores
    offs_d = tl.arange(0, FORM.BLOCK_D)
    mask_d = offs_d < FORM.HEAD_SIZE
    page = _pages(table, begin, first, last, FORM)
    for start_n in tl.range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = (offs_n >= first) & (offs_n < last)
        if FORM.CACHED:
            # Views of one cache have the same strides. Tiles begin where a page does, or lie within one.
            within = tl.arange(0, BLOCK_N) % PAGE if BLOCK_N % PAGE == 0 else offs_n % PAGE
            offset = page.to(tl.int64) * stride_page + within * stride_k
            k_ptrs, v_ptrs = k + offset, v + offset
        else:
            k_ptrs = k + (base + offs_n).to(tl.int64) * stride_k
            v_ptrs = v + (base + offs_n).to(tl.int64) * stride_v
        # Pages are looked up a tile ahead: so the loads of keys and values wait for nothing, and can be far ahead.
        page = _pages(table, start_n + BLOCK_N, first, last, FORM)
        # What is not seen is read as 0: 0 * NaN is NaN.
        if MASKED and PADDED:
            keys = tl.load(k_ptrs[:, None] + offs_d[None], mask=mask_n[:, None] & mask_d[None], other=0.0)
            values = tl.load(v_ptrs[:, None] + offs_d[None], mask=mask_n[:, None] & mask_d[None], other=0.0)
        elif MASKED:
            keys = tl.load(k_ptrs[:, None] + offs_d[None], mask=mask_n[:, None], other=0.0)
            values = tl.load(v_ptrs[:, None] + offs_d[None], mask=mask_n[:, None], other=0.0)
        elif PADDED:
            keys = tl.load(k_ptrs[:, None] + offs_d[None], mask=mask_d[None], other=0.0)
            values = tl.load(v_ptrs[:, None] + offs_d[None], mask=mask_d[None], other=0.0)
        else:
            keys = tl.load(k_ptrs[:, None] + offs_d[None])
            values = tl.load(v_ptrs[:, None] + offs_d[None])
        if FORM.WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        else:
            keys, values = keys.to(q.dtype), values.to(q.dtype)

        qk = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            if FORM.CACHED:
                mask = mask_n[None] & (offs_n[None] <= positions[:, None])
                if FORM.TREE:
                    before = positions[:, None] - offs_n[None]
                    bit = (hidden[:, None] >> tl.minimum(tl.maximum(before, 0), 63).to(tl.int64)) & 1
                    mask &= (before > 63) | (bit == 0)
                if FORM.WINDOW:
                    mask &= offs_n[None] > counted[:, None] - window
                if FORM.WINDOW and not FORM.ONE:  # between queries that lie apart, what no window reaches may be stale
                    values = tl.where((tl.max(mask.to(tl.int32), 0) > 0)[:, None], values, 0.0)
            else:
                mask = mask_n[None] & (positions[:, None] >= 0)
        if FORM.FUSED:  # the scale is positive, and goes into the exponential
            if MASKED:
                qk = tl.where(mask, qk, float("-inf"))
            m_ij = tl.maximum(m_i, tl.max(qk, 1) * scale)
        else:
            if FORM.CAP:  # scale is 2 log2(e) scale / cap, cap is log2(e) cap; tanh(x) = 1 - 2 / (1 + exp(2 x))
                qk = cap - 2 * cap / (1 + tl.exp2(qk * scale))
            else:
                qk = qk * scale
            if FORM.ALIBI:
                qk -= slope[:, None] * tl.abs(positions[:, None] - offs_n[None]).to(tl.float32)
            if MASKED:
                qk = tl.where(mask, qk, float("-inf"))
            m_ij = tl.maximum(m_i, tl.max(qk, 1))
        shift = m_ij
        if MASKED:
            shift = tl.where(m_ij == float("-inf"), 0.0, m_ij)
        if FORM.FUSED:
            p = tl.exp2(qk * scale - shift[:, None])
        else:
            p = tl.exp2(qk - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij
    return acc, m_i, l_i


@triton.jit
def attention_kernel(
    out,  # [T, Hq, D]
    lse,  # float32 [T, Hq], or None
    q,  # [T, Hq, D]
    kv,  # keys and values: of the cache; without one, this step's
    step,  # block table int32 [R, blocks], items int32 [n, FIELDS], kv_index int64 [T], hidden int64 [T], or None
    scratch,  # see `_Scratch` of the body
    sinks,  # float32 [Hq], or None
    slopes,  # the same
    scores,  # scale, cap, window
    out_strides,  # token, head
    lse_strides,
    q_strides,
    kv_strides,  # page, token of k, token of v, head of k, head of v
    table_stride,
    FORM: tl.constexpr,  # `Form`
):
    """One item for PACKED query heads. Program p: item p // heads, heads p % heads."""
    GROUP: tl.constexpr = FORM.GROUP
    PACKED: tl.constexpr = FORM.PACKED
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    PARTS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    HEADS: tl.constexpr = FORM.KV_HEADS * PARTS
    LOG2E: tl.constexpr = 1.4426950408889634
    start_dependent(FORM.DEPENDENT)
    table, items, kv_index, hidden = step
    pid = tl.program_id(0)
    head, item = pid % HEADS, items + (pid // HEADS) * FORM.FIELDS
    kv_head, part = head // PARTS, head % PARTS
    num_queries = tl.load(item + 3)
    if num_queries == 0:
        return
    row, base, token = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end = tl.load(item + 4), tl.load(item + 5)
    first, all_from, all_to = tl.load(item + 6), tl.load(item + 7), tl.load(item + 8)
    chunk, chunks, slot = tl.load(item + 9), tl.load(item + 10), tl.load(item + 11)

    # Rows of the tile are queries, and within each the heads that share a KV head.
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
    if FORM.CACHED:
        positions = tl.load(kv_index + offs_t, mask=mask_m, other=-1).to(tl.int32)
    else:
        positions = tl.where(mask_m, token + query - base, -1)
    bits, counted = positions, positions
    if FORM.TREE:
        bits = tl.load(hidden + offs_t, mask=mask_m, other=0)
        counted = positions - ones(bits)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    if FORM.ALIBI:
        slope = tl.load(slopes + q_head, mask=mask_m, other=0.0) * LOG2E

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    cached = (
        kv[0] + kv_head.to(tl.int64) * kv_strides[3],
        kv[1] + kv_head.to(tl.int64) * kv_strides[4],
        table + row.to(tl.int64) * table_stride,
        base,
    )
    asked = (queries, positions, slope, bits, counted)
    strides = (kv_strides[0], kv_strides[1], kv_strides[2])
    if FORM.SHORT:
        # Memory is what it waits for: one loop whose loads run ahead without a break is worth more than fewer masks.
        acc, m_i, l_i = _span(acc, m_i, l_i, asked, cached, strides, scores, begin, end, first, end, True, FORM)
    else:
        # Tiles that every query sees whole need no mask; before them a window may begin, after them they end.
        plain_from, plain_to = (all_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N, all_to // BLOCK_N * BLOCK_N
        if FORM.WINDOW:
            plain_from = tl.minimum(tl.maximum(plain_from, begin), tl.maximum(begin, end))
            stop = tl.minimum(plain_from, end)
            acc, m_i, l_i = _span(acc, m_i, l_i, asked, cached, strides, scores, begin, stop, first, end, True, FORM)
        else:
            plain_from = begin
        plain_to = tl.maximum(plain_from, tl.minimum(plain_to, end))
        acc, m_i, l_i = _span(
            acc, m_i, l_i, asked, cached, strides, scores, plain_from, plain_to, first, end, False, FORM
        )
        acc, m_i, l_i = _span(acc, m_i, l_i, asked, cached, strides, scores, plain_to, end, first, end, True, FORM)

    finish = True
    if chunks > 1:
        partial, sums, counters = scratch
        mine = ((slot + chunk) * HEADS + head).to(tl.int64)
        tl.store(partial + (mine * BLOCK_M + offs_m)[:, None] * BLOCK_D + offs_d[None], acc, mask=mask_m[:, None])
        tl.store(sums + mine * 2 * BLOCK_M + offs_m, m_i, mask=mask_m)
        tl.store(sums + (mine * 2 + 1) * BLOCK_M + offs_m, l_i, mask=mask_m)
        tl.debug_barrier()  # all threads have stored, before one says so
        counter = counters + slot * HEADS + head
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        finish = done == chunks - 1
        if finish:
            tl.store(counter, 0)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            for other in tl.range(0, chunks):
                its = ((slot + other) * HEADS + head).to(tl.int64)
                its_m = tl.load(sums + its * 2 * BLOCK_M + offs_m, mask=mask_m, other=0.0, cache_modifier=".cg")
                its_l = tl.load(sums + (its * 2 + 1) * BLOCK_M + offs_m, mask=mask_m, other=0.0, cache_modifier=".cg")
                its_acc = tl.load(
                    partial + (its * BLOCK_M + offs_m)[:, None] * BLOCK_D + offs_d[None],
                    mask=mask_m[:, None], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                m_ij = tl.maximum(m_i, its_m)
                shift = tl.where(m_ij == float("-inf"), 0.0, m_ij)
                alpha, beta = tl.exp2(m_i - shift), tl.exp2(its_m - shift)
                l_i = l_i * alpha + its_l * beta
                acc = acc * alpha[:, None] + its_acc * beta[:, None]
                m_i = m_ij
    if finish:
        if FORM.SINKS:
            sink = tl.load(sinks + q_head, mask=mask_m, other=0.0) * LOG2E
            m_ij = tl.maximum(m_i, sink)
            alpha = tl.exp2(m_i - m_ij)
            l_i = l_i * alpha + tl.exp2(sink - m_ij)
            acc = acc * alpha[:, None]
            m_i = m_ij
        l_i = tl.where(m_i == float("-inf"), 1.0, l_i)  # it sees nothing
        acc = acc / l_i[:, None]
        out_ptrs = out + offs_t * out_strides[0] + q_head * out_strides[1]
        tl.store(out_ptrs[:, None] + offs_d[None], acc.to(out.dtype.element_ty), mask=mask)
        if FORM.LSE:
            logarithm = (m_i + tl.log2(l_i)) / LOG2E
            tl.store(lse + offs_t * lse_strides[0] + q_head * lse_strides[1], logarithm, mask=mask_m)
