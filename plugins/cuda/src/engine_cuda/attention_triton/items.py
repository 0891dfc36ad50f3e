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
def ones(bits):
    """int32; how many bits of int64 numbers are set (SWAR: the sums of ever more bits, side by side)."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bytes_ * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _work(rows, lengths, shape, CACHED: tl.constexpr):
    """(first token, tokens, units, tiles of keys) of some rows; after the last row comes one of padding tokens.

    lengths: (query_start_loc, seq_lens, num_rows, num_tokens). shape: (fewest, most, queries of a unit, keys of a tile,
    window); rows with other than fewest .. most tokens have no units.
    """
    query_start_loc, seq_lens, num_rows, num_tokens = lengths
    fewest, most, bq, tile, window = shape
    start = tl.load(query_start_loc + rows, mask=rows <= num_rows, other=0)
    stop = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=num_tokens)
    count = tl.where(rows <= num_rows, stop - start, 0)
    units = tl.where((count >= fewest) & (count <= most), (count + bq - 1) // bq, 0)
    if CACHED:
        keys = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
        if window > 0:
            keys = tl.minimum(keys, window + tl.minimum(count, bq))
    else:
        keys = tl.where(rows < num_rows, count, 0)
    return start, count, units, (keys + tile - 1) // tile


COUNTS = ("num_rows", "num_tokens", "first_list", "bound_short", "bound_long")
"""Arguments that change from step to step: what is compiled is the same for all of them."""


@triton.jit(do_not_specialize=COUNTS)
def plan_kernel(
    items,  # int32 [bound_short + bound_long, FIELDS]
    step,  # query_start_loc, seq_lens, kv_index, and for TREE hidden
    num_rows,
    num_tokens,
    window,  # 0: none
    first_list,  # of the programs with program_id(1) 0
    unit_queries,  # of a unit, at most. This and what follows: of short units, of long ones
    tile_keys,  # of a tile
    least_tiles,  # of a chunk
    most_chunks,  # of a unit
    waves,  # items that run at once; 0: keys are not divided
    bound_short,  # items that there is room for. Triton specializes what stands in a tuple: these two change
    bound_long,
    CACHED: tl.constexpr,
    ONE: tl.constexpr,  # every row has one token
    TREE: tl.constexpr,  # see `Form`
    BQ: tl.constexpr,  # a power of two, both of unit_queries at least
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Program (r, i) writes the items of row r in list i: rows of up to unit_queries[0] tokens, and the longer ones."""
    query_start_loc, seq_lens, kv_index, hidden = step
    own = tl.program_id(0)
    is_long = tl.program_id(1) + first_list == 1
    bq = tl.where(is_long, unit_queries[1], unit_queries[0])
    tile = tl.where(is_long, tile_keys[1], tile_keys[0])
    least = tl.where(is_long, least_tiles[1], least_tiles[0])
    most = tl.where(is_long, most_chunks[1], most_chunks[0])
    wave = tl.where(is_long, waves[1], waves[0])
    bound = tl.where(is_long, bound_long, bound_short)
    items += tl.where(is_long, bound_short, 0).to(tl.int64) * FIELDS
    fewest_tokens = tl.where(is_long, unit_queries[0] + 1, 1)
    most_tokens = tl.where(is_long, num_tokens, unit_queries[0])
    lengths = (query_start_loc, seq_lens, num_rows, num_tokens)
    shape = (fewest_tokens, most_tokens, bq, tile, window)

    # How many tiles a chunk has: as few as give no more items than run at once.
    all_units, all_tiles, longest = 0, 0, 1
    for block in range(0, num_rows + 1, ROWS):
        rows = block + tl.arange(0, ROWS)
        _, _, units, tiles = _work(rows, lengths, shape, CACHED)
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
                    _, _, units, tiles = _work(rows, lengths, shape, CACHED)
                    made += tl.sum(units * tl.maximum(1, (tiles + middle - 1) // middle))
                fits = made <= wave
                chunk = tl.where(fits, middle, chunk)
                low = tl.where(fits, low, middle + 1)

    # Where this row's items begin, and the partial results of those that are divided.
    place, slot, total = 0, 0, 0
    for block in range(0, num_rows + 1, ROWS):
        rows = block + tl.arange(0, ROWS)
        _, _, units, tiles = _work(rows, lengths, shape, CACHED)
        chunks = tl.maximum(1, tl.minimum(most, (tiles + chunk - 1) // chunk))
        made = units * chunks
        place += tl.sum(tl.where(rows < own, made, 0))
        slot += tl.sum(tl.where((rows < own) & (chunks > 1), made, 0))
        total += tl.sum(made)
    each = tl.arange(0, AT_ONCE)
    if own == num_rows + 1:  # the last program ends the list
        for at in range(total, bound, AT_ONCE):
            tl.store(items + (at + each) * FIELDS + 3, 0, mask=at + each < bound)
    else:
        start, count, units, tiles = _work(own, lengths, shape, CACHED)
        chunks = tl.maximum(1, tl.minimum(most, (tiles + chunk - 1) // chunk))
        made = units * chunks
        offs_q = tl.arange(0, BQ)
        for at in range(0, made, AT_ONCE):
            # The last units come first: they see the most keys, and what takes long has to begin early.
            number = made - 1 - (at + each)
            unit, part = number // chunks, number % chunks
            token = start + unit * bq
            queries = tl.minimum(bq, start + count - token)
            if CACHED:
                mask_q = (offs_q[None] < queries[:, None]) & (number >= 0)[:, None] & (own < num_rows)
                index = tl.load(kv_index + token[:, None] + offs_q[None], mask=mask_q, other=0).to(tl.int32)
                highest = tl.max(tl.where(mask_q, index, -1), 1)
                all_before, position = index, index  # what each sees all keys up to
                if TREE:
                    bits = tl.load(hidden + token[:, None] + offs_q[None], mask=mask_q, other=0)
                    all_before = tl.maximum(-1, tl.where(bits == 0, index, index - 64))
                    position = index - ones(bits)
                lowest = tl.min(tl.where(mask_q, all_before, 0x7FFFFFFF), 1)
                last = highest + 1  # 0 for padding, and where no query sees anything
                all_from, all_to = tl.zeros_like(last), lowest + 1
                first = tl.zeros_like(last)
                if window > 0:
                    lowest = tl.min(tl.where(mask_q & (index >= 0), position, 0x7FFFFFFF), 1)
                    first = tl.minimum(last, tl.maximum(0, lowest - window + 1))
                    all_from = tl.maximum(0, highest - window + 1)
            else:
                last = tl.zeros_like(token) + tl.where(own < num_rows, count, 0)
                first, all_from, all_to = tl.zeros_like(last), tl.zeros_like(last), last
            aligned = first // tile * tile
            piece = ((last - aligned + tile - 1) // tile + chunks - 1) // chunks * tile
            begin = aligned + part * piece
            line = items + (place + at + each) * FIELDS
            mask = (number >= 0) & (place + at + each < bound)
            tl.store(line, tl.zeros_like(token) + own, mask=mask)
            tl.store(line + 1, tl.zeros_like(token) + start, mask=mask)
            tl.store(line + 2, token, mask=mask)
            tl.store(line + 3, queries, mask=mask)
            tl.store(line + 4, begin, mask=mask)
            tl.store(line + 5, tl.minimum(last, begin + piece), mask=mask)
            tl.store(line + 6, first, mask=mask)
            tl.store(line + 7, all_from, mask=mask)
            tl.store(line + 8, all_to, mask=mask)
            tl.store(line + 9, part, mask=mask)
            tl.store(line + 10, tl.zeros_like(token) + chunks, mask=mask)
            tl.store(line + 11, slot + unit * chunks, mask=mask)
