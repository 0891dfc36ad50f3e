"""Which blocks of the slots are in the prefix cache: full ones, and partly filled last ones.

A full block is cached once its tokens are known and a plan that computes it is made.

A hit in whole blocks goes on within a block where cached tokens follow that share a beginning with the request's: in a
block that goes on otherwise, in the partly filled last block of a sequence that has ended, or in that of one that runs.
The request gets fresh pages, and the step copies the content into them before it does anything else.

The rule where groups have blocks of different lengths: a partial block begins where blocks of all groups end, every
group holds all its tokens, and every group copies all its pages that hold some of them. So a partial block is shorter
than the match unit. A model with a "state" group has none: of a block's tokens it keeps the state after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from engine.kv.hashing import Digest, Hashed, extend_hashes, first_media, partial_hash
from engine.kv.index import PrefixIndex, RadixChild
from engine.kv.matching import Hit, PartialBlock, RunningTokens, Sequence
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable, spans
from engine.types.kv import NULL_PAGE

NO_TAIL = b""
"""The tail hash of a slot that nobody may copy from."""
_NEVER = np.iinfo(np.int32).max


class CachedBlocks:
    """Names pages in the index, and tells the evictor and who listens. No block is offered twice.

    Args:
        index, pool: the manager's.
        tables: of the groups that grow with the sequence. Pages of others are shared whole, never copied.
        block_size: tokens of the hash unit.
        unit: tokens; partial blocks begin at multiples of it.
        digest: the hash function.
        num_slots: slots.

    Attributes:
        tail_hash: for each slot the hash after its last cached unit; `NO_TAIL` where it may not be copied from.
        computed_limit: int32 [num_slots]; while the slot's prompt is under way, its tokens that plans already made
            compute; then more than it will ever have.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pool: PagePool,
        tables: tuple[BlockTable, ...],
        block_size: int,
        unit: int,
        digest: Digest,
        num_slots: int,
    ) -> None:
        self._index = index
        self._pool = pool
        self._tables = tables
        self._block_size = block_size
        self._unit = unit
        self._unit_hashes = unit // block_size
        self._digest = digest
        self._has_partial = all(table.group.kind != "state" for table in tables)
        self._num_cached = np.full(num_slots, _NEVER, np.int32)  # hash units of each slot that the index was offered
        self._block_places = np.arange(block_size, 0, -1)
        self._unit_places = np.arange(unit, 0, -1)
        self.tail_hash = [NO_TAIL] * num_slots
        self.computed_limit = np.zeros(num_slots, np.int32)

    # -- which slots ---------------------------------------------------------------------------------------------------
    def begin(self, slot: int, num_tokens: int) -> None:
        """A slot's blocks are cached from now on; those of its first tokens are already."""
        self._num_cached[slot] = num_tokens // self._block_size

    def caches(self, slot: int) -> bool:
        """Whether the slot's blocks are cached."""
        return bool(self._num_cached[slot] != _NEVER)

    def end(self, slot: int) -> None:
        """Nothing more of the slot is cached, nor are partial blocks copied from it."""
        self._num_cached[slot] = _NEVER
        self.tail_hash[slot] = NO_TAIL

    def end_all(self) -> None:
        """Nothing more of any running slot is cached, nor are partial blocks copied from it."""
        self._num_cached[:] = _NEVER
        self.tail_hash[:] = [NO_TAIL] * len(self.tail_hash)

    # -- full blocks ---------------------------------------------------------------------------------------------------
    def cache_full_blocks(
        self, slots: np.ndarray, filled: np.ndarray, sequences: Sequences[Hashed | None], tokens: np.ndarray
    ) -> None:
        """Put the full blocks of slots into the prefix cache.

        Args:
            slots: int [n]; each once.
            filled: int [n]; tokens of each that are known and computed (by a plan that is made, at least).
            sequences: what each slot holds; hashes are extended in place where more are needed.
            tokens: int32 [num_slots, max_model_len].
        """
        size = self._block_size
        start, end = self._num_cached[slots], filled // size
        late = (end > start).nonzero()[0]
        if not late.size:
            return
        slots, start, end = slots[late], start[late], end[late]
        self._num_cached[slots] = end
        mine: list[Hashed] = []
        # What decodes do: one block more. Their tokens are gathered at once.
        digest, data = self._digest, tokens[slots[:, None], (end * size)[:, None] - self._block_places].tobytes()
        for i, (slot, blocks) in enumerate(zip(slots.tolist(), end.tolist(), strict=True)):
            held = sequences[slot]
            assert held is not None
            hashes, media = held.hashes, held.media
            if len(hashes) == blocks - 1 and not media:
                before = hashes[-1] if hashes else held.root
                hashes.append(digest(before + data[4 * i * size : 4 * (i + 1) * size]))
            else:
                extend_hashes(hashes, held.root, tokens[slot, : blocks * size], size, digest=digest, media=media)
            mine.append(held)
            if not media:
                units = blocks // self._unit_hashes * self._unit_hashes
                self.tail_hash[slot] = hashes[units - 1] if units else held.root
        for group, table in enumerate(self._tables):
            step = table.tokens_per_block // size
            first = np.maximum(start // step, table.first_block[slots])
            counts = np.maximum(end // step - first, 0)
            row, block = spans(first, counts)
            of_row = slots[row]
            # The page before, where the slot still holds it and the index names that one.
            parents = table.pages[of_row, block - 1]
            parents[(block == table.first_block[of_row]) | ~self._pool.committed[parents]] = NULL_PAGE
            self._cache_blocks(group, step, mine, slots, tokens, row, block, table.pages[of_row, block], parents)

    def _cache_blocks(
        self,
        group: int,
        step: int,
        sequences: list[Hashed],
        slots: np.ndarray,
        tokens: np.ndarray,
        rows: np.ndarray,
        blocks: np.ndarray,
        pages: np.ndarray,
        before: np.ndarray,
    ) -> None:
        """Name the pages of these blocks, each `step` hash units long, where the index names no other for them.

        Args:
            sequences: n of them, in `slots`, int [n]; tokens: of all slots.
            rows: int [m]; whose block it is, among the sequences.
            before: the pages of the blocks before these, as far as they are known without a look into the index.
        """
        index = self._index
        whose, ends = rows.tolist(), ((blocks + 1) * step).tolist()
        suffix = index.suffix(group)
        keys = [sequences[row].hashes[end - 1] + suffix for row, end in zip(whose, ends, strict=True)]
        new = index.add(keys, pages.tolist())
        if not new:
            return
        if len(new) < pages.size:
            rows, blocks, pages, before = rows[new], blocks[new], pages[new], before[new]
        for i in ((before == NULL_PAGE) & (blocks > 0)).nonzero()[0].tolist():
            end = ends[new[i]] - step
            before[i] = index.page_of(sequences[whose[new[i]]].hashes[end - 1] + suffix) or NULL_PAGE
        self._pool.commit(pages, before)
        if not group:
            self._add_units(sequences, slots, tokens, rows, blocks, pages)
        if self._index.events is not None:
            added = zip(rows.tolist(), blocks.tolist(), pages.tolist(), strict=True)
            self._tell_stored(group, step, sequences, tokens[slots], list(added))

    def _add_units(
        self,
        sequences: list[Hashed],
        slots: np.ndarray,
        tokens: np.ndarray,
        rows: np.ndarray,
        blocks: np.ndarray,
        pages: np.ndarray,
    ) -> None:
        """New blocks of the first group, as for `_cache_blocks`: tells of those that end a unit."""
        ends = (blocks + 1) * self._tables[0].tokens_per_block
        last = ends % self._unit == 0
        if np.count_nonzero(last) < last.size:
            rows, ends, pages = rows[last], ends[last], pages[last]
        data, size = tokens[slots[rows, None], ends[:, None] - self._unit_places].tobytes(), 4 * self._unit
        places = range(0, len(data), size)
        for row, end, page, i in zip(rows.tolist(), ends.tolist(), pages.tolist(), places, strict=True):
            self._add_unit(end, sequences[row], data[i : i + size], page)

    def _tell_stored(
        self,
        group: int,
        step: int,
        sequences: list[Hashed],
        tokens: np.ndarray,
        blocks: list[tuple[int, int, int]],
    ) -> None:
        """Blocks (place in `sequences`, block, page) were committed; those that follow one another are one event."""
        assert self._index.events is not None
        size = self._tables[group].tokens_per_block
        begin = 0
        for i, (row, block, _) in enumerate(blocks, 1):
            if i < len(blocks) and blocks[i][:2] == (row, block + 1):
                continue
            sequence, first, end = sequences[row], blocks[begin][1], block + 1
            self._index.events.stored(
                group,
                [(page, sequence.hashes[(b + 1) * step - 1]) for _, b, page in blocks[begin:i]],
                sequence.hashes[first * step - 1] if first else None,
                tokens[row, first * size : end * size],
                size,
                sequence.lora_id,
            )
            begin = i

    # -- partial blocks ------------------------------------------------------------------------------------------------
    def extend(self, hit: Hit, sequence: Sequence, max_tokens: int, running: RunningTokens | None) -> Hit:
        """The hit with the longest partial block that can be had, of at most `max_tokens` tokens in all."""
        start = hit.num_tokens
        most = min(self._unit, max_tokens - start) if self._has_partial else 0
        if sequence.media:
            most = first_media(sequence.media, start, start + most) - start
        if most < 1:
            return hit
        parent = sequence.before(start // self._block_size)
        wanted = sequence.tokens[start : start + most]
        partial = self._cached(parent, wanted, start)
        if running is not None:
            partial = self._running(parent, wanted, start, running, partial)
        return hit if partial is None else Hit(start + partial.num_tokens, hit.groups, partial)

    def _cached(self, parent: bytes, wanted: np.ndarray, start: int) -> PartialBlock | None:
        for n, child in self._index.children.nearest(parent, wanted.tobytes()):
            sources = [self._pages(child, n, table) for table in self._tables]
            if all(pages.size for pages in sources):
                return PartialBlock(n, tuple(sources), cached=True)
        return None

    def _pages(self, child: RadixChild, num_tokens: int, table: BlockTable) -> np.ndarray:
        """The pages of a group that hold the child's first tokens; empty where one is gone."""
        size, group = table.tokens_per_block, table.group.index
        length, hashes = len(child[0]) // 4, child[1]
        pages = np.empty(table.blocks(num_tokens), np.int32)
        for block in range(pages.size):
            end = (block + 1) * size
            hashed = hashes[end // self._block_size - 1] if end <= length else hashes[-1]
            page = self._index.page_of(self._index.key(hashed, group))
            if page is None:
                return pages[:0]
            pages[block] = page
        return pages

    def _running(
        self, parent: bytes, wanted: np.ndarray, start: int, running: RunningTokens, best: PartialBlock | None
    ) -> PartialBlock | None:
        slots = []
        slot = -1
        try:
            while True:
                slot = self.tail_hash.index(parent, slot + 1)
                slots.append(slot)
        except ValueError:
            pass
        if not slots:
            return best
        there = np.minimum(self.computed_limit[slots], running.known[slots] - 1) - start
        same = running.tokens[slots, start : start + wanted.size] == wanted
        same &= np.arange(wanted.size) < there[:, None]
        lengths = np.where(same.all(axis=1), wanted.size, same.argmin(axis=1))
        for place in np.argsort(-lengths, kind="stable").tolist():
            n, slot = int(lengths[place]), slots[place]
            if n <= (0 if best is None else best.num_tokens):
                return best
            if all(table.first_block[slot] * table.tokens_per_block <= start for table in self._tables):
                sources = tuple(
                    table.pages[slot, start // table.tokens_per_block : table.blocks(start + n)].copy()
                    for table in self._tables
                )
                return PartialBlock(n, sources, cached=False)
        return best

    def hashes_of(self, sequence: Sequence) -> set[bytes]:
        """The hashes under which full and partly filled blocks of this sequence may be cached."""
        size, found = self._block_size, set(sequence.hashes)
        for start in range(0, min(sequence.tokens.size, len(sequence.hashes) * size + 1), self._unit):
            tokens = sequence.tokens[start : start + self._unit].tobytes()
            for _, hashes, _, _ in self._index.children.beginnings(sequence.before(start // size), tokens):
                found.update(hashes)
        return found

    def _add_unit(self, end: int, held: Hashed, tokens: bytes, page: int) -> None:
        """The unit that ends at token `end` was cached; `page`: the last of the first group in it.

        tokens: of the unit, int32.
        """
        start, size, hashes = end - self._unit, self._block_size, held.hashes
        if held.media and first_media(held.media, start, end) < end:
            return
        parent = hashes[start // size - 1] if start else held.root
        of_unit = tuple(hashes[start // size : end // size])
        self._index.children.add((tokens, of_unit, parent, page))

    def cache_partial_block(self, slot: int, sequence: Sequence) -> None:
        """Put the slot's tokens after its last whole unit into the prefix cache; its pages are given back next.

        sequence: its tokens as far as they are known and computed; hashes of all its full hash units.
        """
        if not self._has_partial:
            return
        length, size = sequence.tokens.size, self._block_size
        start = length // self._unit * self._unit
        if start == length or any(table.first_block[slot] * table.tokens_per_block > start for table in self._tables):
            return
        if sequence.media and first_media(sequence.media, start, length) < length:
            return
        whole = length // size
        hashes = sequence.hashes[start // size : whole]
        if whole * size < length:
            hashes = [
                *hashes,
                partial_hash(sequence.before(whole), sequence.tokens[whole * size :], digest=self._digest),
            ]
        index, pool = self._index, self._pool
        first_page = NULL_PAGE
        for table in self._tables:
            tokens, last = table.tokens_per_block, table.blocks(length) - 1
            page = int(table.pages[slot, last])
            if length % tokens:
                key = index.key(hashes[-1], table.group.index)
                known = index.page_of(key)
                if known is None:
                    before = index.key(sequence.before(last * tokens // size), table.group.index) if last else b""
                    index.add([key], [page])
                    pool.commit(_one(page), _one(index.page_of(before) or NULL_PAGE))
                    known = page
                page = known
            if table.group.index == 0:
                first_page = page
        if pool.committed[first_page]:
            parent = sequence.before(start // size)
            index.children.add((sequence.tokens[start:].tobytes(), tuple(hashes), parent, first_page))


def _one(page: int) -> np.ndarray:
    return np.array([page], np.int32)
