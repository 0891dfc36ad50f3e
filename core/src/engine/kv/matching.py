"""How much of a prompt is cached: one matcher for each kind of cache, and the length that all tables agree on.

full: every block of the prefix must be there. sliding: only those that the last window sees. state: only the last one,
which holds the state that goes on. The longest prefix of whole blocks that satisfies all tables is taken, as vLLM's
hybrid cache coordinator does.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from engine.kv.index import BlockKey, PrefixIndex
from engine.kv.tables import BlockTable


class Sequence(NamedTuple):
    """A request, as the prefix cache reads it.

    Args:
        hashes: of its full blocks, as far as they are needed.
        root: the hash before its first block.
        tokens: int32 [n]; its ids.
        lora_id: of the adapter, for events; `root` covers it.
    """

    hashes: list[bytes]
    root: bytes
    tokens: np.ndarray
    lora_id: str | None = None

    def before(self, block: int) -> bytes:
        """The hash that stands before a block."""
        return self.hashes[block - 1] if block else self.root


class RunningTokens(NamedTuple):
    """The ids of all slots, as the scheduler keeps them.

    Args:
        tokens: int32 [num_slots, max_model_len].
        known: int32 [num_slots]; how many of them are valid. The keys and values of the last one may be computed by the
            plan under construction; those before it are there when that plan begins.
    """

    tokens: np.ndarray
    known: np.ndarray


class TableHit(NamedTuple):
    """What one table takes from the cache.

    Args:
        first_block: the first block taken; those before it have left the window.
        keys: of the blocks taken, in order.
        pages: int32 [n]; their pages, 0 where the block is computed by the very step that is being planned.
    """

    first_block: int
    keys: list[BlockKey]
    pages: np.ndarray


_NONE = TableHit(0, [], np.empty(0, np.int32))


class PartialBlock(NamedTuple):
    """Tokens of a hit beyond its whole blocks: they lie in pages that go on otherwise, and are copied.

    Args:
        num_tokens: at least 1.
        sources: int32 [tables]; the page of each that holds these tokens.
        cached: the pages are the prefix cache's; False: they belong to a running request.
    """

    num_tokens: int
    sources: np.ndarray
    cached: bool


class Hit(NamedTuple):
    """A cached prefix.

    Args:
        num_tokens: its length, the partial block's included.
        tables: each table's whole blocks.
        partial: None where it ends with whole blocks.
        num_missing: of a request that was swapped out: pages that are not cached any more, and have to be loaded.
    """

    num_tokens: int
    tables: tuple[TableHit, ...]
    partial: PartialBlock | None = None
    num_missing: int = 0

    @property
    def num_whole(self) -> int:
        """Tokens in whole blocks, which are shared, not copied."""
        return self.num_tokens if self.partial is None else self.num_tokens - self.partial.num_tokens

    def whole_blocks(self) -> Hit:
        """Its whole blocks alone."""
        return Hit(self.num_whole, self.tables)


def match(
    index: PrefixIndex,
    planned: Set[BlockKey],
    tables: tuple[BlockTable, ...],
    hashes: list[bytes],
    *,
    block_size: int,
    max_tokens: int,
) -> Hit:
    """The longest cached prefix of at most `max_tokens` tokens; its length is 0 where there is none.

    Args:
        index: committed blocks.
        planned: keys of blocks that earlier rows of the plan under construction compute; a step writes all keys and
            values of a layer before it reads any, so they count as cached.
        tables: the manager's.
        hashes: of the prompt's full blocks.
        block_size: tokens of a block.
    """
    last = min(max_tokens // block_size, len(hashes))
    found: list[list[int]] = []
    for table in tables:
        pages = _look_up(
            index, planned, index.keys(hashes[:last], table.index), stop_at_first_miss=table.window is None
        )
        found.append(pages)
        if table.window is None:
            last = len(pages)
        if not last:
            return no_hit(tables)
    runs = [(table, _runs(pages)) for table, pages in zip(tables, found, strict=True) if table.window is not None]
    while last and not all(run[last - 1] >= last - table.first_needed(last * block_size) for table, run in runs):
        last -= 1
    if not last:
        return no_hit(tables)
    hits = []
    for table, pages in zip(tables, found, strict=True):
        first = table.first_needed(last * block_size)
        taken = np.maximum(np.array(pages[first:last], np.int32), 0)
        hits.append(TableHit(first, index.keys(hashes[first:last], table.index), taken))
    return Hit(last * block_size, tuple(hits))


def no_hit(tables: tuple[BlockTable, ...]) -> Hit:
    """Nothing was found."""
    return Hit(0, (_NONE,) * len(tables))


def _look_up(index: PrefixIndex, planned: Set[BlockKey], keys: list[BlockKey], stop_at_first_miss: bool) -> list[int]:
    """For each key its page, 0 where its block is planned, -1 where there is none."""
    page_of = index.page_of
    pages = []
    for key in keys:
        page = page_of(key)
        if page is None:
            if key in planned:
                page = 0
            elif stop_at_first_miss:
                break
            else:
                page = -1
        pages.append(page)
    return pages


def _runs(pages: list[int]) -> list[int]:
    """For each block, how many blocks that end with it are there without a gap."""
    runs, run = [], 0
    for page in pages:
        run = run + 1 if page >= 0 else 0
        runs.append(run)
    return runs
