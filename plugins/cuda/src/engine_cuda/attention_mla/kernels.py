"""Latent attention over pages, in one kernel for decodes, drafts and prompts, and one that joins divided rows.

A program has a tile of queries, BLOCK_M pairs of (token, head) of one row of the step, token-major: all heads of a
token see the same vectors, and the tokens of a row nearly the same. It reads the row's vectors once, tile by tile, and
uses each tile twice, as keys and as values (the tile that a program keeps is [BLOCK_N, C]; both products take it from
the same shared memory). Softmax is online (Milakov, Gimelshein 2018; Dao et al., "FlashAttention", 2022).

A row's vectors may be divided among `num_splits` programs ("Flash-Decoding", Dao et al. 2023), which leave means of
their part in float32, with the logarithms of their sums, for `join_kernel`. What a program does follows from the
device's own data alone, so that a captured launch stays right for any lengths: a program without work returns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.attention_storing import stored

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _blocks_before(query_start_loc, row, first_row, first_token, heads, BLOCK_M: tl.constexpr):
    """Tiles of the rows first_row .. row - 1, at most one too many for each."""
    tokens = tl.load(query_start_loc + row) - first_token
    return (tokens.to(tl.int64) * heads // BLOCK_M).to(tl.int32) + row - first_row


@triton.jit
def _place(block, query_start_loc, first_row, num_rows, heads, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr):
    """(row, its first token, its number of tokens, the first of its (token, head) pairs) of a tile of queries."""
    if RAGGED:
        first_token = tl.load(query_start_loc + first_row)
        low, high = first_row, num_rows
        while high - low > 1:  # the last row whose tiles begin at this one or before
            middle = (low + high) // 2
            before = _blocks_before(query_start_loc, middle, first_row, first_token, heads, BLOCK_M) <= block
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        row = low
        start = tl.load(query_start_loc + row)
        count = tl.load(query_start_loc + row + 1) - start
        begun = _blocks_before(query_start_loc, row, first_row, first_token, heads, BLOCK_M)
        pair = (block - begun) * BLOCK_M
    else:  # one token a row: row r is token r
        each = (heads + BLOCK_M - 1) // BLOCK_M
        row = block // each
        start = row
        count = block * 0 + 1
        pair = (block - row * each) * BLOCK_M
    return row, start, count, pair


@triton.jit
def _seen(kv_index, slot_mapping, token, there, PAGE: tl.constexpr):
    """The last place that each query sees; -1 for none.

    A token that pads a row of fewer drafts stands on the null page, at a place that nobody wrote: what lies there must
    not reach the row's own queries, whose tile it shares. It sees the row's first vector alone.
    """
    place = tl.load(kv_index + token, mask=there, other=-1).to(tl.int32)
    owned = tl.load(slot_mapping + token, mask=there, other=0) >= PAGE
    return tl.where(owned, place, tl.minimum(place, 0))


@triton.jit
def _part(keys, num_splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """How many vectors one of the programs takes that share `keys` of them: whole tiles."""
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    return tl.maximum((tiles + num_splits - 1) // num_splits * BLOCK_N, LEAST)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits"])  # or each size of step would be compiled
def latent_attention_kernel(
    q_latent,  # [T, H, C]
    q_rope,  # [T, H, P]
    cache,  # [pages, PAGE, C + P]
    block_table,  # int32 [R, blocks]
    query_start_loc,  # int32 [R + 1]
    kv_index,  # int64 [T]
    slot_mapping,  # int64 [T]
    out,  # [T, H, C]
    lse,  # float32 [T, H]
    partial,  # float32 [tiles * splits, BLOCK_M, C_BLOCK]
    partial_lse,  # float32 [tiles * splits, BLOCK_M], in base 2
    scale_log2,
    first_row,
    num_rows,
    heads,
    num_splits,
    q_latent_token,
    q_latent_head,
    q_rope_token,
    q_rope_head,
    cache_page,
    cache_vector,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    C: tl.constexpr,
    P: tl.constexpr,
    C_BLOCK: tl.constexpr,  # C and P, up to powers of two
    P_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    RAGGED: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    WIDEN: tl.constexpr,  # compute in float32: the interpreter's bfloat16 is wrong
):
    """Program (tile of queries, split)."""
    # The tiles at a prompt's end see most vectors: they go first, so that short ones fill the gaps.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if RAGGED else tl.program_id(0)
    row, start, count, pair = _place(block, query_start_loc, first_row, num_rows, heads, BLOCK_M, RAGGED)
    if pair >= count * heads:
        return
    pairs = pair + tl.arange(0, BLOCK_M)
    there = pairs < count * heads
    token = start + pairs // heads
    head = pairs % heads
    place = _seen(kv_index, slot_mapping, token, there, PAGE)
    keys = tl.max(place, 0) + 1
    begin = 0
    end = keys
    if SPLIT:
        part = _part(keys, num_splits, BLOCK_N, LEAST)
        begin = tl.program_id(1) * part
        end = tl.minimum(keys, begin + part)
        if begin >= keys:
            return

    c = tl.arange(0, C_BLOCK)
    p = tl.arange(0, P_BLOCK)
    ql_mask = there[:, None] & (c < C)[None, :]
    qr_mask = there[:, None] & (p < P)[None, :]
    ql_at = token.to(tl.int64) * q_latent_token + head * q_latent_head
    qr_at = token.to(tl.int64) * q_rope_token + head * q_rope_head
    ql = tl.load(q_latent + ql_at[:, None] + c[None, :], mask=ql_mask, other=0.0)
    qr = tl.load(q_rope + qr_at[:, None] + p[None, :], mask=qr_mask, other=0.0)
    if WIDEN:
        ql = ql.to(tl.float32)
        qr = qr.to(tl.float32)

    acc = tl.zeros([BLOCK_M, C_BLOCK], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = block_table + row.to(tl.int64) * table_row
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < end
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * cache_page + (key % PAGE) * cache_vector
        # What lies past the end may be anything, NaN included: it is not read.
        latent = tl.load(cache + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        rotated = tl.load(cache + at[:, None] + (C + p)[None, :], mask=inside[:, None] & (p < P)[None, :], other=0.0)
        latent = latent.to(ql.dtype)
        rotated = rotated.to(ql.dtype)
        scores = tl.dot(ql, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(qr, tl.trans(rotated), scores, input_precision="ieee") * scale_log2
        scores = tl.where((key[None, :] <= place[:, None]) & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrunk[:, None], input_precision="ieee")
        top = higher

    seen = total > 0
    mean = acc / tl.where(seen, total, 1.0)[:, None]
    logarithm = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    if SPLIT:
        m = tl.arange(0, BLOCK_M)
        at = (block.to(tl.int64) * num_splits + tl.program_id(1)) * BLOCK_M + m
        tl.store(partial + at[:, None] * C_BLOCK + c[None, :], mean, mask=ql_mask)
        tl.store(partial_lse + at, logarithm, mask=there)
    else:
        at = token.to(tl.int64) * out_token + head * out_head
        tl.store(out + at[:, None] + c[None, :], mean.to(out.dtype.element_ty), mask=ql_mask)
        if LSE:
            tl.store(lse + token.to(tl.int64) * lse_token + head * lse_head, logarithm * LN2, mask=there)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits"])
def join_kernel(
    query_start_loc,
    kv_index,
    slot_mapping,
    out,
    lse,
    partial,
    partial_lse,
    first_row,
    num_rows,
    heads,
    num_splits,
    out_token,
    out_head,
    lse_token,
    lse_head,
    C: tl.constexpr,
    C_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    RAGGED: tl.constexpr,
    LSE: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, up to a power of two
    COLUMNS: tl.constexpr,
):
    """Program (tile of queries, pair in it, columns): the mean of the parts' means by the weight of each."""
    block = tl.program_id(0)
    _row, start, count, pair = _place(block, query_start_loc, first_row, num_rows, heads, BLOCK_M, RAGGED)
    mine = pair + tl.program_id(1)
    if mine >= count * heads:
        return
    pairs = pair + tl.arange(0, BLOCK_M)
    place = _seen(kv_index, slot_mapping, start + pairs // heads, pairs < count * heads, PAGE)
    keys = tl.max(place, 0) + 1
    part = _part(keys, num_splits, BLOCK_N, LEAST)
    parts = (keys + part - 1) // part

    base = (block.to(tl.int64) * num_splits * BLOCK_M) + tl.program_id(1)
    s = tl.arange(0, SPLITS)
    logarithms = tl.load(partial_lse + base + s * BLOCK_M, mask=s < parts, other=float("-inf"))
    top = tl.max(logarithms, 0)
    total = tl.sum(tl.exp2(logarithms - top), 0)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mean = tl.zeros([COLUMNS], tl.float32)
    for split in range(parts):
        at = base + split * BLOCK_M
        weight = tl.exp2(tl.load(partial_lse + at) - top)
        values = tl.load(partial + at * C_BLOCK + column, mask=column < C, other=0.0)
        mean += tl.where(weight > 0, weight, 0.0) * tl.where(weight > 0, values, 0.0)
    token = (start + mine // heads).to(tl.int64)
    head = mine % heads
    at = token * out_token + head * out_head
    tl.store(out + at + column, (mean / total).to(out.dtype.element_ty), mask=column < C)
    if LSE:
        tl.store(lse + token * lse_token + head * lse_head, (top + tl.log2(total)) * LN2)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    latent,  # [T, C]
    rope_key,  # [T, P]
    cache,  # [pages, PAGE, C + P]
    slot_mapping,  # int64 [T]
    num_tokens,
    latent_token,
    rope_token,
    cache_page,
    cache_vector,
    C: tl.constexpr,
    P: tl.constexpr,
    C_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program i: the vectors of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=there, other=0)
    at = slot // PAGE * cache_page + slot % PAGE * cache_vector
    token = token.to(tl.int64)
    c = tl.arange(0, C_BLOCK)
    p = tl.arange(0, P_BLOCK)
    c_mask = there[:, None] & (c < C)[None, :]
    p_mask = there[:, None] & (p < P)[None, :]
    latents = tl.load(latent + (token * latent_token)[:, None] + c[None, :], mask=c_mask, other=0.0)
    rotated = tl.load(rope_key + (token * rope_token)[:, None] + p[None, :], mask=p_mask, other=0.0)
    rotated, latents = stored(rotated, latents, cache.dtype.element_ty)
    tl.store(cache + at[:, None] + c[None, :], latents, mask=c_mask)
    tl.store(cache + at[:, None] + (C + p)[None, :], rotated, mask=p_mask)
