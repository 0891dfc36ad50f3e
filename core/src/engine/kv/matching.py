"""How much of a prompt is cached: one matcher for each kind of cache, and the length that all groups agree on.

full, mla: every block of the prefix must be there. sliding: only those that the last window sees. state: only the
last one, which holds the state that goes on (cross: see `engine.kv.cross`). The longest length that
ends a block in every group and satisfies all groups is taken, as vLLM's hybrid cache coordinator does.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from engine.kv.index import BlockKey, PrefixIndex
from engine.kv.tables import BlockTable


class GroupHit(NamedTuple):
    """What one group takes from the cache.

    Args:
        first_block: the first block taken; those before it have left the window.
        keys: of the blocks taken, in order. Of a "cross" group all that the request has, also where none is taken.
        pages: int32 [n]; their pages, 0 where the block is computed by the very step that is being planned.
    """

    first_block: int
    keys: list[BlockKey]
    pages: np.ndarray


class Tail(NamedTuple):
    """Tokens of a hit beyond its whole blocks: they lie in pages that go on otherwise, and are copied.

    Args:
        num_tokens: at least 1.
        sources: for each group int32 [n]; the pages that hold these tokens, from the first block after the others.
        cached: the pages are the prefix cache's; False: they belong to a running request.
    """

    num_tokens: int
    sources: tuple[np.ndarray, ...]
    cached: bool


class Hit(NamedTuple):
    """A cached prefix.

    Args:
        num_tokens: its length, the tail's included.
        groups: each group's whole blocks.
        tail: None where it ends with whole blocks.
    """

    num_tokens: int
    groups: tuple[GroupHit, ...]
    tail: Tail | None = None

    @property
    def num_whole(self) -> int:
        """Tokens in whole blocks, which are shared, not copied."""
        return self.num_tokens if self.tail is None else self.num_tokens - self.tail.num_tokens

    @property
    def fills_encoder(self) -> bool:
        """Blocks of the encoder's tokens were not found: the request's first step computes them."""
        return any(group.keys and not group.pages.size for group in self.groups)

    def without_tail(self) -> Hit:
        """Its whole blocks alone."""
        return Hit(self.num_whole, self.groups)


def match(
    index: PrefixIndex,
    planned: Set[BlockKey],
    tables: tuple[BlockTable, ...],
    hashes: list[bytes],
    *,
    block_size: int,
    unit: int,
    max_tokens: int,
) -> Hit:
    """The longest cached prefix of at most `max_tokens` tokens; its length is 0 where there is none.

    Args:
        index: committed blocks.
        planned: keys of blocks that earlier rows of the plan under construction compute; a step writes all keys and
            values of a layer before it reads any, so they count as cached.
        tables: one a group.
        hashes: of the prompt's full blocks.
        block_size: tokens of the hash unit.
        unit: tokens; lengths are multiples of it.
    """
    limit = min(max_tokens, len(hashes) * block_size) // unit * unit
    found: list[list[int]] = []
    keys: list[list[BlockKey]] = []
    for table in tables:
        of_group = index.keys(
            hashes, table.group.index, 0, limit // table.tokens_per_block, table.tokens_per_block // block_size
        )
        pages = _look_up(index, planned, of_group, stop_at_first_miss=table.window is None)
        if table.window is None:
            limit = min(limit, len(pages) * table.tokens_per_block) // unit * unit
        keys.append(of_group)
        found.append(pages)
        if not limit:
            return no_hit(tables)
    runs = [_runs(pages) if table.window is not None else None for table, pages in zip(tables, found, strict=True)]
    length = limit
    while length and not all(
        run is None or run[(last := length // table.tokens_per_block) - 1] >= last - table.first_needed(length)
        for table, run in zip(tables, runs, strict=True)
    ):
        length -= unit
    if not length:
        return no_hit(tables)
    groups = []
    for table, pages, of_group in zip(tables, found, keys, strict=True):
        first, last = table.first_needed(length), length // table.tokens_per_block
        taken = np.maximum(np.array(pages[first:last], np.int32), 0)
        groups.append(GroupHit(first, of_group[first:last], taken))
    return Hit(length, tuple(groups))


def no_hit(tables: tuple[BlockTable, ...]) -> Hit:
    """Nothing was found."""
    return Hit(0, tuple(GroupHit(0, [], np.empty(0, np.int32)) for _ in tables))


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
