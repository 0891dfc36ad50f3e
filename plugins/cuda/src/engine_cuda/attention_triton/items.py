"""A step's work, divided on the device: a table of items, one for each program of the attention kernel.

A row's queries are cut into units of some queries each, and the keys that a unit sees into chunks, so that one wave of
programs has about equal work whatever the lengths (the split of FlashDecoding, Dao et al. 2023, with FlashInfer's rule
for how long chunks are, Ye et al. 2025; here the device finds it, since the host knows bounds of lengths only). The
host's grid depends on the number of rows and tokens alone, so that a captured step stays right for any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = 16
"""int32 of an item: one line of 64 bytes.

0 row · 1 the row's first token · 2 the unit's first token · 3 its queries (0: nothing to do) · 4, 5 the chunk's keys,
from .. to, the first a multiple of a tile · 6 the first key that any of the unit's queries sees · 7, 8 keys that all of
them see, from .. to · 9 the chunk · 10 the unit's chunks · 11 where its first chunk's partial result goes. The others
are not used.
"""
ROWS = 256
"""Rows that are looked at together."""
AT_ONCE = 16
"""Items that are written together."""


@triton.jit
def _tokens(rows, query_start_loc, num_rows, num_tokens):
    """first token and number of tokens of some rows; after the last row comes one of padding tokens."""
    start = tl.load(query_start_loc + rows, mask=rows <= num_rows, other=0)
    stop = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=num_tokens)
    return start, tl.where(rows <= num_rows, stop - start, 0)


@triton.jit
def _work(rows, count, seq_lens, num_rows, fewest, most, bq, tile, window, CACHED: tl.constexpr):
    """units, and tiles of keys, of some rows of `count` tokens; none of rows with other than fewest .. most tokens."""
    units = tl.where((count >= fewest) & (count <= most), (count + bq - 1) // bq, 0)
    if CACHED:
        keys = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
        if window > 0:
            keys = tl.minimum(keys, window + tl.minimum(count, bq))
    else:
        keys = tl.where(rows < num_rows, count, 0)
    return units, (keys + tile - 1) // tile


@triton.jit
def is_own(slot_mapping, token, there, PAGE: tl.constexpr):
    """Whether tokens are of their rows. One that pads a row of fewer drafts writes to the null page and stands at a
    place that nobody wrote: what lies there must not reach the row's other queries, so it sees nothing."""
    return there & (tl.load(slot_mapping + token, mask=there, other=0) >= PAGE)


COUNTS = ("num_rows", "num_tokens", "first_list", "bound_short", "bound_long")
"""Arguments that change from step to step: what is compiled is the same for all of them."""


@triton.jit(do_not_specialize=COUNTS)
def plan_kernel(
    items,  # int32 [bound_short + bound_long, FIELDS]
    query_start_loc,
    seq_lens,
    kv_index,
    slot_mapping,
    num_rows,
    num_tokens,
    window,  # 0: none
    first_list,  # of the programs with program_id(1) 0
    bq_short,
    bq_long,
    tile_short,
    tile_long,
    least_short,  # tiles of a chunk, at least
    least_long,
    most_short,  # chunks of a unit, at most
    most_long,
    wave_short,  # items that run at once; 0: keys are not divided
    wave_long,
    bound_short,  # items that there is room for
    bound_long,
    CACHED: tl.constexpr,
    ONE: tl.constexpr,  # every row has one token
    PAGE: tl.constexpr,
    BQ: tl.constexpr,  # a power of two, bq_short and bq_long at least
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Program (r, i) writes the items of row r in list i: rows of up to bq_short tokens, and the longer ones."""
    own = tl.program_id(0)
    is_long = tl.program_id(1) + first_list == 1
    bq = tl.where(is_long, bq_long, bq_short)
    tile = tl.where(is_long, tile_long, tile_short)
    least = tl.where(is_long, least_long, least_short)
    most_chunks = tl.where(is_long, most_long, most_short)
    wave = tl.where(is_long, wave_long, wave_short)
    bound = tl.where(is_long, bound_long, bound_short)
    items += tl.where(is_long, bound_short, 0).to(tl.int64) * FIELDS
    fewest = tl.where(is_long, bq_short + 1, 1)
    most = tl.where(is_long, num_tokens, bq_short)

    # How many tiles a chunk has: as few as give no more items than run at once.
    all_units, all_tiles, longest = 0, 0, 1
    for block in range(0, num_rows + 1, ROWS):
        rows = block + tl.arange(0, ROWS)
        count = _tokens(rows, query_start_loc, num_rows, num_tokens)[1]
        units, tiles = _work(rows, count, seq_lens, num_rows, fewest, most, bq, tile, window, CACHED)
        all_units += tl.sum(units)
        all_tiles += tl.sum(units * tiles)
        longest = tl.maximum(longest, tl.max(tl.where(units > 0, tiles, 0)))
    chunk = tl.maximum(least, longest)
    if wave > 0:
        if all_units > wave:  # every chunk is a unit, but for those that are longer than what a program does on average
            chunk = tl.maximum(least, (all_tiles + wave - 1) // wave)
        else:
            low = least
            while low < chunk:
                middle = (low + chunk) // 2
                made = 0
                for block in range(0, num_rows + 1, ROWS):
                    rows = block + tl.arange(0, ROWS)
                    count = _tokens(rows, query_start_loc, num_rows, num_tokens)[1]
                    units, tiles = _work(rows, count, seq_lens, num_rows, fewest, most, bq, tile, window, CACHED)
                    made += tl.sum(units * tl.maximum(1, (tiles + middle - 1) // middle))
                fits = made <= wave
                chunk = tl.where(fits, middle, chunk)
                low = tl.where(fits, low, middle + 1)

    # Where this row's items begin, and the partial results of those that are divided.
    place, slot, total = 0, 0, 0
    for block in range(0, num_rows + 1, ROWS):
        rows = block + tl.arange(0, ROWS)
        count = _tokens(rows, query_start_loc, num_rows, num_tokens)[1]
        units, tiles = _work(rows, count, seq_lens, num_rows, fewest, most, bq, tile, window, CACHED)
        chunks = tl.maximum(1, tl.minimum(most_chunks, (tiles + chunk - 1) // chunk))
        made = units * chunks
        place += tl.sum(tl.where(rows < own, made, 0))
        slot += tl.sum(tl.where((rows < own) & (chunks > 1), made, 0))
        total += tl.sum(made)
    each = tl.arange(0, AT_ONCE)
    if own == num_rows + 1:  # the last program ends the list
        for at in range(total, bound, AT_ONCE):
            tl.store(items + (at + each) * FIELDS + 3, 0, mask=at + each < bound)
    else:
        start, count = _tokens(own, query_start_loc, num_rows, num_tokens)
        units, tiles = _work(own, count, seq_lens, num_rows, fewest, most, bq, tile, window, CACHED)
        chunks = tl.maximum(1, tl.minimum(most_chunks, (tiles + chunk - 1) // chunk))
        made = units * chunks
        query = tl.arange(0, BQ)
        for at in range(0, made, AT_ONCE):
            # The last units come first: they see the most keys, and what takes long has to begin early.
            number = made - 1 - (at + each)
            unit, part = number // chunks, number % chunks
            token = start + unit * bq
            queries = tl.minimum(bq, start + count - token)
            if CACHED:
                asked = (query[None] < queries[:, None]) & (number >= 0)[:, None] & (own < num_rows)
                if not ONE:
                    asked = is_own(slot_mapping, token[:, None] + query[None], asked, PAGE)
                index = tl.load(kv_index + token[:, None] + query[None], mask=asked, other=0).to(tl.int32)
                highest = tl.max(tl.where(asked, index, -1), 1)
                lowest = tl.min(tl.where(asked, index, 0x7FFFFFFF), 1)
                last = highest + 1  # 0 for padding
                all_from, all_to = tl.zeros_like(last), lowest + 1
                first = tl.zeros_like(last)
                if window > 0:
                    first = tl.minimum(last, tl.maximum(0, lowest - window + 1))
                    all_from = tl.maximum(0, highest - window + 1)
            else:
                last = tl.zeros_like(token) + tl.where(own < num_rows, count, 0)
                first, all_from, all_to = tl.zeros_like(last), tl.zeros_like(last), last
            aligned = first // tile * tile
            piece = ((last - aligned + tile - 1) // tile + chunks - 1) // chunks * tile
            begin = aligned + part * piece
            line = items + (place + at + each) * FIELDS
            there = (number >= 0) & (place + at + each < bound)
            tl.store(line, tl.zeros_like(token) + own, mask=there)
            tl.store(line + 1, tl.zeros_like(token) + start, mask=there)
            tl.store(line + 2, token, mask=there)
            tl.store(line + 3, queries, mask=there)
            tl.store(line + 4, begin, mask=there)
            tl.store(line + 5, tl.minimum(last, begin + piece), mask=there)
            tl.store(line + 6, first, mask=there)
            tl.store(line + 7, all_from, mask=there)
            tl.store(line + 8, all_to, mask=there)
            tl.store(line + 9, part, mask=there)
            tl.store(line + 10, tl.zeros_like(token) + chunks, mask=there)
            tl.store(line + 11, slot + unit * chunks, mask=there)
