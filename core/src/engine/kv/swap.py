"""Pages on their way out of the pool and in: which blocks are taken out, and which must be brought in.

A request that was swapped out finds part of its blocks in the prefix cache when it comes back; only the others, and its
last block where that is not full, are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.kv.hashing import extend_hashes
from engine.kv.manager import KVManager
from engine.kv.matching import Hit, Sequence, TableHit
from engine.types.kv import NULL_PAGE


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """What a slot held when it was swapped out.

    Args:
        num_tokens: whose keys and values are in its pages.
        first_block: of each table.
        cached: its blocks may enter the prefix cache, and be found there.
        num_resets: of the cache, until then; content from before a reset is neither offered nor looked for.
    """

    num_tokens: int
    first_block: tuple[int, ...]
    cached: bool
    num_resets: int


@dataclass(slots=True)
class SwapIn:
    """A request that may enter a slot in the step that is being planned, with pages that the step fills.

    Args:
        cached: its blocks may enter the prefix cache again.
        hit: all its full blocks; NULL_PAGE stands for those to be loaded.
        missing: for each table how many these are.
        num_resets: of the cache, when it was found: after another one, blocks may not enter it.
        step_id: of the plan that fills the pages.
        num_filled: blocks that a connector has found for the request; 0 for one that was swapped.
        places, pages: int32 [m] each; the places[i]-th of all its pages, as `swap_out` gave them, is loaded into
            pages[i]. Known when the step's pages are allocated.
    """

    cached: bool
    hit: Hit
    missing: list[int]
    num_resets: int
    num_filled: int = 0
    step_id: int = 0
    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def swap_out(kv: KVManager, slot: int, num_tokens: int) -> tuple[SwapRecord, np.ndarray]:
    """The record of a slot, and the pages that hold it, table after table, in order.

    num_tokens: computed by plans that are made; those after it are not wanted.
    """
    first_block, pages = [], []
    for table in kv.tables:
        first = max(int(table.first_block[slot]), table.first_needed(num_tokens))
        first_block.append(first)
        pages.append(table.pages[slot, first : table.blocks(num_tokens)])
    record = SwapRecord(num_tokens, tuple(first_block), kv.blocks.caches(slot), kv.num_resets)
    return record, np.concatenate(pages)


def find_swapped(kv: KVManager, record: SwapRecord, sequence: Sequence) -> SwapIn:
    """Look which blocks the prefix cache still has.

    sequence: all that is known of the request; its hashes are extended in place where more are needed.
    """
    cached = record.cached and record.num_resets == kv.num_resets
    hashes = sequence.hashes
    if cached:
        extend_hashes(hashes, sequence.root, sequence.tokens, kv.block_size, digest=kv.digest)
    tables, missing = [], []
    full = record.num_tokens // kv.block_size
    for table, first in zip(kv.tables, record.first_block, strict=True):
        pages = np.full(max(0, full - first), NULL_PAGE, np.int32)
        if cached:
            keys = kv.index.keys(hashes[first:full], table.index)
            pages[:] = [kv.index.page_of(key) or NULL_PAGE for key in keys]
        tables.append(TableHit(first, [], pages))
        missing.append(int(np.count_nonzero(pages == NULL_PAGE)))
    return SwapIn(cached, Hit(record.num_tokens, tuple(tables), num_missing=sum(missing)), missing, kv.num_resets)


def fill_blocks(kv: KVManager, local: Hit, end: int) -> SwapIn:
    """Whole blocks up to token `end`: those of a hit, and beyond it such as are loaded."""
    tables, missing, have, blocks = [], [], local.num_tokens // kv.block_size, end // kv.block_size
    for table, found in zip(kv.tables, local.tables, strict=False):
        first = table.first_needed(end)
        mine = found.pages[first - found.first_block :] if first < have else found.pages[:0]
        missing.append(blocks - max(first, have))
        tables.append(TableHit(first, [], np.append(mine, np.full(missing[-1], NULL_PAGE, np.int32))))
    return SwapIn(True, Hit(end, tuple(tables), num_missing=sum(missing)), missing, kv.num_resets, blocks - have)
