"""A step's pages: reserved by number while the scheduler chooses rows, allocated when all of them are chosen.

So the evictor is called at most once for each kind of news in a step, and a row may find blocks that an earlier row of
the same plan computes.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np

from engine.kv.hashing import Hashed
from engine.kv.index import BlockKey
from engine.kv.manager import KVManager
from engine.kv.matching import Hit, PartialBlock, RunningTokens, Sequence, TableHit
from engine.kv.reuse import Reused
from engine.kv.swap import SwapIn
from engine.kv.tables import BlockTable, spans
from engine.types.kv import NULL_PAGE
from engine.types.plan import NewBlocks, PageCopies, ReusedTokens

_NO_LIMIT = np.iinfo(np.int32).max
_NONE = np.empty(0, np.int32)


class StepPages(NamedTuple):
    """What the plan says of pages.

    Args:
        new_blocks: one for each table.
        copies: to be made before anything is computed; the sources are held until the step is done.
    """

    new_blocks: list[NewBlocks]
    copies: PageCopies | None


class _Entering(NamedTuple):
    sequence: Sequence
    hit: Hit
    swap_in: SwapIn | None


class Reservation:
    """The pages of one step: `decode`, `enter` and `chunk` reserve, then `allocate` puts pages into the block tables.

    Args:
        kv: whose pages these are.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._counts = [0] * len(kv.tables)
        self._planned: set[BlockKey] = set()
        self._decodes: tuple[np.ndarray, np.ndarray] | None = None
        self._entering: dict[int, _Entering] = {}
        self._chunks: list[tuple[int, int, bool]] = []
        self._pages: list[np.ndarray] = []
        self._entries: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in kv.tables]
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []  # (sources, destinations), a page of each table

    # -- reserve ------------------------------------------------------------------------------------------------------
    @property
    def num_available(self) -> int:
        """Pages that can still be reserved."""
        return self._kv.pool.num_available - sum(self._counts)

    def match(self, sequence: Sequence, max_tokens: int, running: RunningTokens | None = None) -> Hit:
        """See `KVManager.match`; blocks that chunks of this step compute count as cached."""
        return self._kv.match(sequence, max_tokens, running, self._planned)

    def decode(self, slots: np.ndarray, need: np.ndarray) -> None:
        """Pages for slots that compute one token, or one and drafts: `need` is what `KVManager.decode_need` or
        `extend_need` gives, and its sum fits `num_available`. Once a step."""
        self._decodes = slots, need
        for table, of_table in enumerate(need):
            self._counts[table] += int(np.count_nonzero(of_table) if need.dtype == bool else np.add.reduce(of_table))

    def fit_chunk(self, slot: int, start: int, chunk: int, hit: Hit | None = None) -> int:
        """The most tokens from `start`, at most `chunk`, whose pages are available; 0 for none.

        hit: for a request that has no slot yet (`slot` is then ignored).
        """
        tables = self._kv.tables
        have = [_blocks(table, slot, hit) for table in tables]

        def missing(end: int) -> int:
            return sum(max(0, table.blocks(end) - n) for table, n in zip(tables, have, strict=True))

        available = self.num_available - (0 if hit is None else self._kv.pages_taken_by(hit))
        if missing(start + chunk) <= available:
            return chunk
        low, high = 0, chunk  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if missing(start + middle) <= available else (low, middle)
        return low

    def enter(
        self, slot: int, sequence: Sequence, hit: Hit, swap_in: SwapIn | None = None, reused: Reused | None = None
    ) -> None:
        """A request enters an empty slot with this hit; its first chunk is the next that is reserved.

        swap_in: where this step fills pages; `hit` is that of this. Nothing of the slot is cached, before the step's
            result is there.
        reused: behind the hit. Nothing of the slot is cached, then or later: what follows is approximate.
        """
        kv = self._kv
        self._entering[slot] = _Entering(sequence, hit, swap_in)
        for found in hit.tables:
            kv.pool.hold(found.pages[found.pages != NULL_PAGE])
        if hit.partial is not None:
            (kv.pool.hold if hit.partial.cached else kv.pool.pin)(hit.partial.sources)
        if swap_in is not None:
            self._counts = [n + more for n, more in zip(self._counts, swap_in.missing, strict=True)]
        if reused is not None:
            assert kv.reuses is not None
            kv.reuses.enter(slot, reused)
        if not kv.enable_prefix_caching or swap_in is not None or reused is not None:
            kv.blocks.end(slot)
        else:
            kv.blocks.begin(slot, hit.num_whole)

    def chunk(self, slot: int, start: int, size: int, hashes: list[bytes], last: bool = True) -> int:
        """Pages for known tokens of a slot, as many as `fit_chunk` allowed; later rows of this plan find its blocks,
        unless they are computed from what is loaded.

        Args:
            hashes: of the request's blocks.
            last: no known token of the slot lies behind.

        Returns the number of pages.
        """
        kv, end = self._kv, start + size
        entering = self._entering.get(slot)
        hit = None if entering is None else entering.hit
        caches = kv.blocks.caches(slot)
        self._chunks.append((slot, end, last))
        total, filled = 0, hashes[start // kv.block_size : end // kv.block_size]
        for table in kv.tables:
            pages = max(0, table.blocks(end) - _blocks(table, slot, hit))
            self._counts[table.index] += pages
            total += pages
            if caches and table.kind != "state":  # a state is there when its step has ended, not before
                self._planned.update(kv.index.keys(filled, table.index))
        return total

    def reuse(self, step_id: int, slots: np.ndarray, computed: np.ndarray, tokens: np.ndarray) -> ReusedTokens | None:
        """See `engine.kv.reuse.Reuses.of_step`."""
        return None if self._kv.reuses is None else self._kv.reuses.of_step(step_id, slots, computed, tokens)

    # -- allocate -----------------------------------------------------------------------------------------------------
    def allocate(self, step_id: int, sequences: Sequences[Hashed | None], tokens: np.ndarray) -> StepPages:
        """Take all reserved pages, put them into the block tables, and cache the blocks that the step's chunks fill.

        sequences, tokens: as for `CachedBlocks.cache_full_blocks`.
        """
        kv = self._kv
        self._pages = kv.pool.take(self._counts)
        if self._decodes is not None:
            self._place_decodes(*self._decodes)
        for slot, end, last in self._chunks:
            entering = self._entering.get(slot)
            loaded = [] if entering is None else self._open(slot, entering)
            self._place_chunk(slot, end, None if entering is None else entering.hit.partial)
            if entering is not None and entering.swap_in is not None:
                _say_what_is_loaded(kv, slot, entering.swap_in, loaded)
            kv.blocks.computed_limit[slot] = _NO_LIMIT if last else end
            kv.blocks.cache_full_blocks(np.array([slot]), np.array([end]), sequences, tokens)
            if last and kv.reuses is not None and kv.blocks.caches(slot):
                held = sequences[slot]
                assert held is not None
                kv.reuses.remember(Sequence(held.hashes, held.root, tokens[slot, :end], held.lora_id))
        return StepPages([_new_blocks(of_table) for of_table in self._entries], self._page_copies(step_id))

    def _place_decodes(self, slots: np.ndarray, need: np.ndarray) -> None:
        for table, of_table in zip(self._kv.tables, need, strict=True):
            if need.dtype == bool:
                growing = slots[of_table]
                if not growing.size:
                    continue
                block = table.num_blocks[growing]
                table.num_blocks[growing] = block + 1
            else:
                have = table.num_blocks[slots]
                row, block = spans(have, of_table)
                growing = slots[row]
                table.num_blocks[slots] = have + of_table
            pages = self._next(table.index, growing.size)
            table.pages[growing, block] = pages
            self._entries[table.index].append((growing, block, pages))

    def _open(self, slot: int, entering: _Entering) -> list[np.ndarray]:
        """Fill an empty slot with its hit, and with pages for its encoder's tokens and for what is to be loaded.

        Rows are placed in the order in which they were reserved, so blocks that an earlier row of this plan computes
        are cached by now.

        Returns for each table the pages that wait to be loaded, NULL_PAGE standing for those that do not.
        """
        kv, (sequence, hit, swap_in) = self._kv, entering
        caches, loaded = kv.blocks.caches(slot), []
        kv.blocks.computed_limit[slot] = 0
        if caches:  # others may copy from its last block
            kv.blocks.tail_hash[slot] = sequence.before(hit.num_whole // kv.block_size)
        for table, found in zip(kv.tables, hit.tables, strict=True):
            if swap_in is None:
                pages = self._pages_of_hit(found)
            else:
                pages, empty = found.pages.copy(), found.pages == NULL_PAGE
                pages[empty] = self._next(table.index, swap_in.missing[table.index])
                loaded.append(np.where(empty, pages, NULL_PAGE))
            table.num_blocks[slot] = table.first_block[slot] = found.first_block
            self._append(table, slot, pages)
        return loaded

    def _pages_of_hit(self, found: TableHit) -> np.ndarray:
        kv, pages = self._kv, found.pages
        planned = np.flatnonzero(pages == NULL_PAGE)
        if planned.size:
            pages = pages.copy()
            pages[planned] = [kv.index.page_of(found.keys[place]) for place in planned.tolist()]
            kv.pool.hold(pages[planned])
        return pages

    def _place_chunk(self, slot: int, end: int, partial: PartialBlock | None) -> None:
        """Put pages into a slot until it has room for `end` tokens; a partial block is copied into the first ones."""
        first = []
        for table in self._kv.tables:
            pages = self._next(table.index, max(0, table.blocks(end) - int(table.num_blocks[slot])))
            self._append(table, slot, pages)
            first.append(pages[:1])
        if partial is not None:
            self._copies.append((partial.sources, np.concatenate(first)))

    def _append(self, table: BlockTable, slot: int, pages: np.ndarray) -> None:
        if pages.size:
            first = table.append(slot, pages)
            block = np.arange(first, first + pages.size, dtype=np.int32)
            self._entries[table.index].append((np.full(pages.size, slot, np.int32), block, pages))

    def _next(self, table: int, n: int) -> np.ndarray:
        pages = self._pages[table][:n]
        self._pages[table] = self._pages[table][n:]
        assert pages.size == n
        return pages

    def _page_copies(self, step_id: int) -> PageCopies | None:
        if not self._copies:
            return None
        source, destination = (np.concatenate(pages) for pages in zip(*self._copies, strict=True))
        self._kv.pool.release(source, step_id)
        table = np.arange(source.size, dtype=np.int32) % len(self._kv.tables)
        return PageCopies(table=table, source=source, destination=destination)


def _blocks(table: BlockTable, slot: int, hit: Hit | None) -> int:
    return int(table.num_blocks[slot]) if hit is None else hit.num_whole // table.tokens_per_block


def _say_what_is_loaded(kv: KVManager, slot: int, swap_in: SwapIn, loaded: list[np.ndarray]) -> None:
    """Pages of full blocks, and in each table the one of a block that was not full."""
    num_tokens, targets = swap_in.hit.num_tokens, []
    for table, of_table in zip(kv.tables, loaded, strict=True):
        targets.append(of_table)
        targets.append(table.pages[slot, num_tokens // table.tokens_per_block : table.blocks(num_tokens)])
    pages = np.concatenate(targets)
    swap_in.places = np.flatnonzero(pages != NULL_PAGE).astype(np.int32)
    swap_in.pages = pages[swap_in.places]


def _new_blocks(entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> NewBlocks:
    if len(entries) == 1:
        slot, block, page = entries[0]
    elif entries:
        slot, block, page = (np.concatenate(column) for column in zip(*entries, strict=True))
    else:
        slot = block = page = _NONE
    return NewBlocks(slot=slot, index=block, page=page)
