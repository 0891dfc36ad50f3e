"""The attention kernel: one program computes a unit of queries, packed with the query heads that share a KV head, over
a chunk of its keys. What its programs do says `items`.

Online softmax over tiles of keys (FlashAttention, Dao et al. 2022 and 2023), with exponentials of base 2. The last
chunk of a unit to finish puts the partial results together (as Stream-K does, Osama et al. 2023), in the same order
whoever it is, so that there is one launch and the result does not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.attention_triton.items import is_own

LOG2E = 1.4426950408889634


@triton.jit
def _pages(table, start, first, last, PAGE: tl.constexpr, TILE: tl.constexpr, CACHED: tl.constexpr):
    """The pages of a tile's keys; one where a tile lies within a page. Of keys that are not there, the null page."""
    if not CACHED:
        return start
    elif PAGE % TILE == 0:
        return tl.load(table + start // PAGE, mask=start < last, other=0)
    else:
        key = tl.arange(0, TILE)
        block = start // PAGE + key // PAGE if TILE % PAGE == 0 else (start + key) // PAGE
        return tl.load(table + block, mask=(start + key >= first) & (start + key < last), other=0)


@triton.jit
def _span(
    acc,
    top,
    total,
    q,
    place,
    slope,
    begin,
    end,
    first,
    last,
    k,
    v,
    table,
    base,
    k_page,
    k_token,
    v_token,
    scale,
    cap,
    window,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ONE: tl.constexpr,
    MASKED: tl.constexpr,
    CACHED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FUSED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take in the keys begin .. end - 1, a tile at a time; MASKED: not all of them are seen by all queries."""
    element = tl.arange(0, WIDTH)
    inside = element < SIZE
    page = _pages(table, begin, first, last, PAGE, TILE, CACHED)
    for start in tl.range(begin, end, TILE):
        key = start + tl.arange(0, TILE)
        here = (key >= first) & (key < last)
        if CACHED:
            # Views of one cache have the same strides. Tiles begin where a page does, or lie within one.
            within = tl.arange(0, TILE) % PAGE if TILE % PAGE == 0 else key % PAGE
            at = page.to(tl.int64) * k_page + within * k_token
            k_at, v_at = k + at, v + at
        else:
            k_at = k + (base + key).to(tl.int64) * k_token
            v_at = v + (base + key).to(tl.int64) * v_token
        # Pages are looked up a tile ahead: so the loads of keys and values wait for nothing, and can be far ahead.
        page = _pages(table, start + TILE, first, last, PAGE, TILE, CACHED)
        # What is not seen is read as 0: 0 * NaN is NaN.
        if MASKED and SIZE < WIDTH:
            keys = tl.load(k_at[:, None] + element[None], mask=here[:, None] & inside[None], other=0.0)
            values = tl.load(v_at[:, None] + element[None], mask=here[:, None] & inside[None], other=0.0)
        elif MASKED:
            keys = tl.load(k_at[:, None] + element[None], mask=here[:, None], other=0.0)
            values = tl.load(v_at[:, None] + element[None], mask=here[:, None], other=0.0)
        elif SIZE < WIDTH:
            keys = tl.load(k_at[:, None] + element[None], mask=inside[None], other=0.0)
            values = tl.load(v_at[:, None] + element[None], mask=inside[None], other=0.0)
        else:
            keys = tl.load(k_at[:, None] + element[None])
            values = tl.load(v_at[:, None] + element[None])
        if WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        else:
            keys, values = keys.to(q.dtype), values.to(q.dtype)

        score = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            if CACHED:
                seen = here[None] & (key[None] <= place[:, None])
                if WINDOW:
                    seen &= key[None] > place[:, None] - window
                    if not ONE:  # between queries that lie apart, what no window reaches may be stale
                        values = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], values, 0.0)
            else:
                seen = here[None] & (place[:, None] >= 0)
        if FUSED:  # the scale is positive, and goes into the exponential
            if MASKED:
                score = tl.where(seen, score, float("-inf"))
            raised = tl.maximum(top, tl.max(score, 1) * scale)
        else:
            if CAP:  # scale is 2 log2(e) scale / cap, cap is log2(e) cap; tanh(x) = 1 - 2 / (1 + exp(2 x))
                score = cap - 2 * cap / (1 + tl.exp2(score * scale))
            else:
                score = score * scale
            if ALIBI:
                score -= slope[:, None] * tl.abs(place[:, None] - key[None]).to(tl.float32)
            if MASKED:
                score = tl.where(seen, score, float("-inf"))
            raised = tl.maximum(top, tl.max(score, 1))
        shift = raised
        if MASKED:
            shift = tl.where(raised == float("-inf"), 0.0, raised)
        if FUSED:
            weight = tl.exp2(score * scale - shift[:, None])
        else:
            weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = raised
    return acc, top, total


@triton.jit
def attention_kernel(
    out,  # [T, Hq, D]
    lse,  # float32 [T, Hq]
    q,  # [T, Hq, D]
    k,  # of the cache; without one, this step's
    v,
    table,  # int32 [R, blocks]
    items,  # int32 [n, FIELDS]
    kv_index,  # int64 [T]
    slot_mapping,  # int64 [T]
    partial,  # float32 [slots, heads, ROWS, WIDTH]
    sums,  # float32 [slots, heads, 2, ROWS]: largest score, and sum of exponentials
    counters,  # int32 [slots, heads]: zeros, and zeros again when all programs are done
    sinks,  # float32 [Hq]
    slopes,
    scale,
    cap,
    window,
    out_token,
    out_head,
    lse_token,
    lse_head,
    q_token,
    q_head,
    k_page,
    k_head,
    k_token,
    v_head,
    v_token,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    PACKED: tl.constexpr,  # of them in one program
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, up to a power of two
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ONE: tl.constexpr,  # a unit is one query
    SHORT: tl.constexpr,
    CACHED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    LSE: tl.constexpr,
    FUSED: tl.constexpr,
    WIDEN: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One item for PACKED query heads. Program p: item p // heads, heads p % heads."""
    PARTS: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    HEADS: tl.constexpr = KV_HEADS * PARTS
    LOG2E: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    head, item = program % HEADS, items + (program // HEADS) * FIELDS
    kv_head, part = head // PARTS, head % PARTS
    queries = tl.load(item + 3)
    if queries == 0:
        return
    row, base, token = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end = tl.load(item + 4), tl.load(item + 5)
    first, all_from, all_to = tl.load(item + 6), tl.load(item + 7), tl.load(item + 8)
    chunk, chunks, slot = tl.load(item + 9), tl.load(item + 10), tl.load(item + 11)

    # Rows of the tile are queries, and within each the heads that share a KV head.
    member = tl.arange(0, ROWS)
    query, within = member // PACKED, part * PACKED + member % PACKED
    there = (query < queries) & (within < GROUP)
    q_head_index = kv_head * GROUP + within
    at_token = (token + query).to(tl.int64)
    element = tl.arange(0, WIDTH)
    inside = there[:, None] & (element < SIZE)[None]
    q_at = q + at_token * q_token + q_head_index * q_head
    queried = tl.load(q_at[:, None] + element[None], mask=inside, other=0.0)
    if WIDEN:
        queried = queried.to(tl.float32)
    if CACHED:
        known = there if ONE else is_own(slot_mapping, at_token, there, PAGE)
        place = tl.load(kv_index + at_token, mask=known, other=-1).to(tl.int32)
    else:
        place = tl.where(there, token + query - base, -1)
    slope = tl.zeros((ROWS,), tl.float32)
    if ALIBI:
        slope = tl.load(slopes + q_head_index, mask=there, other=0.0) * LOG2E

    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    keys, values = k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head
    pages = table + row.to(tl.int64) * table_row
    if SHORT:
        # Memory is what it waits for: one loop whose loads run ahead without a break is worth more than fewer masks.
        acc, top, total = _span(
            acc, top, total, queried, place, slope, begin, end, first, end, keys, values, pages, base,
            k_page, k_token, v_token, scale, cap, window,
            SIZE, WIDTH, PAGE, TILE, ONE, True, CACHED, WINDOW, CAP, ALIBI, FUSED, WIDEN,
        )  # fmt: skip
    else:
        # Tiles that every query sees whole need no mask; before them a window may begin, after them they end.
        plain_from, plain_to = (all_from + TILE - 1) // TILE * TILE, all_to // TILE * TILE
        if WINDOW:
            plain_from = tl.minimum(tl.maximum(plain_from, begin), tl.maximum(begin, end))
            acc, top, total = _span(
                acc, top, total, queried, place, slope, begin, tl.minimum(plain_from, end), first, end, keys, values,
                pages, base, k_page, k_token, v_token, scale, cap, window,
                SIZE, WIDTH, PAGE, TILE, ONE, True, CACHED, WINDOW, CAP, ALIBI, FUSED, WIDEN,
            )  # fmt: skip
        else:
            plain_from = begin
        plain_to = tl.maximum(plain_from, tl.minimum(plain_to, end))
        acc, top, total = _span(
            acc, top, total, queried, place, slope, plain_from, plain_to, first, end, keys, values, pages, base,
            k_page, k_token, v_token, scale, cap, window,
            SIZE, WIDTH, PAGE, TILE, ONE, False, CACHED, WINDOW, CAP, ALIBI, FUSED, WIDEN,
        )  # fmt: skip
        acc, top, total = _span(
            acc, top, total, queried, place, slope, plain_to, end, first, end, keys, values, pages, base,
            k_page, k_token, v_token, scale, cap, window,
            SIZE, WIDTH, PAGE, TILE, ONE, True, CACHED, WINDOW, CAP, ALIBI, FUSED, WIDEN,
        )  # fmt: skip

    finish = True
    if chunks > 1:
        mine = ((slot + chunk) * HEADS + head).to(tl.int64)
        tl.store(partial + (mine * ROWS + member)[:, None] * WIDTH + element[None], acc, mask=there[:, None])
        tl.store(sums + mine * 2 * ROWS + member, top, mask=there)
        tl.store(sums + (mine * 2 + 1) * ROWS + member, total, mask=there)
        tl.debug_barrier()  # all threads have stored, before one says so
        counter = counters + slot * HEADS + head
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        finish = done == chunks - 1
        if finish:
            tl.store(counter, 0)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            for other in tl.range(0, chunks):
                its = ((slot + other) * HEADS + head).to(tl.int64)
                its_top = tl.load(sums + its * 2 * ROWS + member, mask=there, other=0.0, cache_modifier=".cg")
                its_total = tl.load(sums + (its * 2 + 1) * ROWS + member, mask=there, other=0.0, cache_modifier=".cg")
                its_acc = tl.load(
                    partial + (its * ROWS + member)[:, None] * WIDTH + element[None],
                    mask=there[:, None], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                raised = tl.maximum(top, its_top)
                shift = tl.where(raised == float("-inf"), 0.0, raised)
                shrink, its_shrink = tl.exp2(top - shift), tl.exp2(its_top - shift)
                total = total * shrink + its_total * its_shrink
                acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
                top = raised
    if finish:
        if SINKS:
            sink = tl.load(sinks + q_head_index, mask=there, other=0.0) * LOG2E
            raised = tl.maximum(top, sink)
            shrink = tl.exp2(top - raised)
            total = total * shrink + tl.exp2(sink - raised)
            acc = acc * shrink[:, None]
            top = raised
        total = tl.where(top == float("-inf"), 1.0, total)  # padding sees nothing
        acc = acc / total[:, None]
        out_at = out + at_token * out_token + q_head_index * out_head
        tl.store(out_at[:, None] + element[None], acc.to(out.dtype.element_ty), mask=inside)
        if LSE:
            logarithm = tl.where(top == float("-inf"), 0.0, (top + tl.log2(total)) / LOG2E)
            tl.store(lse + at_token * lse_token + q_head_index * lse_head, logarithm, mask=there)
