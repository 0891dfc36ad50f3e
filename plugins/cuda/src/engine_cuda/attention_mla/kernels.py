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
def _seen(kv_index, token, mask_m):
    """The last place that each query sees; -1 for none."""
    return tl.load(kv_index + token, mask=mask_m, other=-1).to(tl.int32)


@triton.jit
def _part(keys, num_splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """How many vectors one of the programs takes that share `keys` of them: whole tiles."""
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    return tl.maximum((tiles + num_splits - 1) // num_splits * BLOCK_N, LEAST)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits"])  # or each size of step would be compiled
def latent_attention_kernel(
    queries,  # [T, H, C] for the latents, [T, H, P] for the rotary keys
    cache,  # [pages, PAGE, C + P]
    step,  # block table int32 [R, blocks], query_start_loc int32 [R + 1], kv_index int64 [T]
    out,  # [T, H, C]
    lse,  # float32 [T, H]
    partial,  # float32 [tiles * splits, BLOCK_M, BLOCK_C], and their lse [tiles * splits, BLOCK_M] in base 2
    scale_log2,
    first_row,
    num_rows,
    heads,
    num_splits,
    q_strides,  # token, head of the first queries; of the second
    cache_strides,  # page, vector
    table_stride,
    out_strides,  # token, head
    lse_strides,
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,  # C and P, up to powers of two
    BLOCK_P: tl.constexpr,
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
    block_table, query_start_loc, kv_index = step
    # The tiles at a prompt's end see most vectors: they go first, so that short ones fill the gaps.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if RAGGED else tl.program_id(0)
    row, start, count, pair = _place(block, query_start_loc, first_row, num_rows, heads, BLOCK_M, RAGGED)
    if pair >= count * heads:
        return
    offs_m = pair + tl.arange(0, BLOCK_M)
    mask_m = offs_m < count * heads
    token = start + offs_m // heads
    head = offs_m % heads
    place = _seen(kv_index, token, mask_m)
    keys = tl.max(place, 0) + 1
    begin = 0
    end = keys
    if SPLIT:
        part = _part(keys, num_splits, BLOCK_N, LEAST)
        begin = tl.program_id(1) * part
        end = tl.minimum(keys, begin + part)
        if begin >= keys:
            return

    offs_c = tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    mask_c = mask_m[:, None] & (offs_c < C)[None, :]
    mask_p = mask_m[:, None] & (offs_p < P)[None, :]
    ql_ptrs = queries[0] + token.to(tl.int64) * q_strides[0] + head * q_strides[1]
    qr_ptrs = queries[1] + token.to(tl.int64) * q_strides[2] + head * q_strides[3]
    ql = tl.load(ql_ptrs[:, None] + offs_c[None, :], mask=mask_c, other=0.0)
    qr = tl.load(qr_ptrs[:, None] + offs_p[None, :], mask=mask_p, other=0.0)
    if WIDEN:
        ql = ql.to(tl.float32)
        qr = qr.to(tl.float32)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    for start_n in range(begin, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < end
        page = tl.load(table + offs_n // PAGE, mask=mask_n, other=0).to(tl.int64)
        ptrs = cache + page * cache_strides[0] + (offs_n % PAGE) * cache_strides[1]
        # What lies past the end may be anything, NaN included: it is not read.
        latent = tl.load(ptrs[:, None] + offs_c[None, :], mask=mask_n[:, None] & (offs_c < C)[None, :], other=0.0)
        rotated = tl.load(
            ptrs[:, None] + (C + offs_p)[None, :], mask=mask_n[:, None] & (offs_p < P)[None, :], other=0.0
        )
        latent = latent.to(ql.dtype)
        rotated = rotated.to(ql.dtype)
        qk = tl.dot(ql, tl.trans(latent), input_precision="ieee")
        qk = tl.dot(qr, tl.trans(rotated), qk, input_precision="ieee") * scale_log2
        qk = tl.where((offs_n[None, :] <= place[:, None]) & mask_n[None, :], qk, float("-inf"))
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        shift = tl.where(m_ij == float("-inf"), 0.0, m_ij)  # a query that has seen nothing yet
        p = tl.exp2(qk - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij

    blind = l_i == 0  # of a NaN that it has seen there is a NaN in it
    l_i = tl.where(blind, 1.0, l_i)
    mean = acc / l_i[:, None]
    logarithm = tl.where(blind, float("-inf"), m_i + tl.log2(l_i))
    if SPLIT:
        at = (block.to(tl.int64) * num_splits + tl.program_id(1)) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial[0] + at[:, None] * BLOCK_C + offs_c[None, :], mean, mask=mask_c)
        tl.store(partial[1] + at, logarithm, mask=mask_m)
    else:
        out_ptrs = out + token.to(tl.int64) * out_strides[0] + head * out_strides[1]
        tl.store(out_ptrs[:, None] + offs_c[None, :], mean.to(out.dtype.element_ty), mask=mask_c)
        if LSE:
            tl.store(lse + token.to(tl.int64) * lse_strides[0] + head * lse_strides[1], logarithm * LN2, mask=mask_m)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_splits"])
def join_kernel(
    step,  # query_start_loc, kv_index
    out,
    lse,
    partial,  # as `latent_attention_kernel` leaves them
    first_row,
    num_rows,
    heads,
    num_splits,
    out_strides,
    lse_strides,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    RAGGED: tl.constexpr,
    LSE: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, up to a power of two
    BLOCK_COLUMNS: tl.constexpr,
):
    """Program (tile of queries, pair in it, columns): the mean of the parts' means by the weight of each."""
    query_start_loc, kv_index = step
    means, mean_lse = partial
    block = tl.program_id(0)
    _row, start, count, pair = _place(block, query_start_loc, first_row, num_rows, heads, BLOCK_M, RAGGED)
    mine = pair + tl.program_id(1)
    if mine >= count * heads:
        return
    offs_m = pair + tl.arange(0, BLOCK_M)
    place = _seen(kv_index, start + offs_m // heads, offs_m < count * heads)
    keys = tl.max(place, 0) + 1
    part = _part(keys, num_splits, BLOCK_N, LEAST)
    parts = (keys + part - 1) // part

    base = (block.to(tl.int64) * num_splits * BLOCK_M) + tl.program_id(1)
    offs_s = tl.arange(0, SPLITS)
    logarithms = tl.load(mean_lse + base + offs_s * BLOCK_M, mask=offs_s < parts, other=float("-inf"))
    m_i = tl.max(logarithms, 0)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)  # a query that sees nothing
    l_i = tl.sum(tl.exp2(logarithms - shift), 0)
    blind = l_i == 0
    l_i = tl.where(blind, 1.0, l_i)
    offs_c = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mean = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for split in range(parts):
        at = base + split * BLOCK_M
        weight = tl.exp2(tl.load(mean_lse + at) - shift)
        values = tl.load(means + at * BLOCK_C + offs_c, mask=offs_c < C, other=0.0)
        mean += tl.where(weight > 0, weight, 0.0) * tl.where(weight > 0, values, 0.0)
    token = (start + mine // heads).to(tl.int64)
    head = mine % heads
    out_ptrs = out + token * out_strides[0] + head * out_strides[1]
    tl.store(out_ptrs + offs_c, (mean / l_i).to(out.dtype.element_ty), mask=offs_c < C)
    if LSE:
        logarithm = tl.where(blind, float("-inf"), (m_i + tl.log2(l_i)) * LN2)
        tl.store(lse + token * lse_strides[0] + head * lse_strides[1], logarithm)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    vectors,  # latents [T, C], rotary keys [T, P]
    cache,  # [pages, PAGE, C + P]
    slot_mapping,  # int64 [T]
    num_tokens,
    strides,  # token of the latents, of the rotary keys
    cache_strides,  # page, vector
    C: tl.constexpr,
    P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program i: the vectors of BLOCK_T tokens."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < num_tokens
    slot = tl.load(slot_mapping + offs_t, mask=mask_t, other=0)
    ptrs = cache + slot // PAGE * cache_strides[0] + slot % PAGE * cache_strides[1]
    offs_t = offs_t.to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    offs_p = tl.arange(0, BLOCK_P)
    mask_c = mask_t[:, None] & (offs_c < C)[None, :]
    mask_p = mask_t[:, None] & (offs_p < P)[None, :]
    latents = tl.load(vectors[0] + (offs_t * strides[0])[:, None] + offs_c[None, :], mask=mask_c, other=0.0)
    rotated = tl.load(vectors[1] + (offs_t * strides[1])[:, None] + offs_p[None, :], mask=mask_p, other=0.0)
    rotated, latents = stored(rotated, latents, cache.dtype.element_ty)
    tl.store(ptrs[:, None] + offs_c[None, :], latents, mask=mask_c)
    tl.store(ptrs[:, None] + (C + offs_p)[None, :], rotated, mask=mask_p)
