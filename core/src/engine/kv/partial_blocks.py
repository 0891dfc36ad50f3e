"""Partly filled last blocks: of sequences that have ended, and of those that run.

A hit in whole blocks goes on within a block where cached tokens follow that share a beginning with the request's: in a
block that goes on otherwise, in the partly filled last block of a sequence that has ended, or in that of one that runs.
The request gets fresh pages, and the step copies the content into them before it does anything else.

The rule where groups have blocks of different lengths: a partial block begins where blocks of all groups end, every
group holds all its tokens, and every group copies all its pages that hold some of them. So a partial block is shorter
than the match unit. A model with a "state" group has none: of a block's tokens it keeps the state after the last one.
"""

from __future__ import annotations

import numpy as np

from engine.kv.hashing import Digest, Hashed, first_media, partial_hash
from engine.kv.index import PrefixIndex, RadixChild
from engine.kv.matching import Hit, PartialBlock, RunningTokens, Sequence
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable
from engine.types.kv import NULL_PAGE

NO_TAIL = b""
"""The tail hash of a slot that nobody may copy from."""


class PartialBlocks:
    """Finds partial blocks, and keeps those of sequences that end.

    Args:
        index, pool: the manager's.
        tables: of the groups that grow with the sequence. Pages of others are shared whole, never copied.
        block_size: tokens of the hash unit.
        unit: tokens; partial blocks begin at multiples of it.
        digest: the hash function.
        num_slots: slots.

    Attributes:
        unit: as it was given.
        tail_hash: for each slot the hash after its last committed unit; `NO_TAIL` where it may not be copied from.
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
        self.unit = unit
        self._index = index
        self._pool = pool
        self._tables = tables
        self._block_size = block_size
        self._digest = digest
        self._any = all(table.group.kind != "state" for table in tables)
        self.tail_hash = [NO_TAIL] * num_slots
        self.computed_limit = np.zeros(num_slots, np.int32)

    # -- finding ------------------------------------------------------------------------------------------------------
    def extend(self, hit: Hit, sequence: Sequence, max_tokens: int, running: RunningTokens | None) -> Hit:
        """The hit with the longest partial block that can be had, of at most `max_tokens` tokens in all."""
        start = hit.num_tokens
        most = min(self.unit, max_tokens - start) if self._any else 0
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
        length, hashes = len(child.tokens) // 4, child.hashes
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
        for start in range(0, min(sequence.tokens.size, len(sequence.hashes) * size + 1), self.unit):
            tokens = sequence.tokens[start : start + self.unit].tobytes()
            for child in self._index.children.beginnings(sequence.before(start // size), tokens):
                found.update(child.hashes)
        return found

    # -- keeping ------------------------------------------------------------------------------------------------------
    def add_unit(self, end: int, held: Hashed, tokens: bytes, page: int) -> None:
        """The unit that ends at token `end` was committed; `page`: the last of the first group in it.

        tokens: of the unit, int32.
        """
        start, size, hashes = end - self.unit, self._block_size, held.hashes
        if held.media and first_media(held.media, start, end) < end:
            return
        parent = hashes[start // size - 1] if start else held.root
        of_unit = tuple(hashes[start // size : end // size])
        self._index.children.add(RadixChild(tokens, of_unit, parent, page))

    def keep(self, slot: int, sequence: Sequence) -> None:
        """Put the slot's tokens after its last whole unit into the prefix cache; its pages are given back next.

        sequence: its tokens as far as they are known and computed; hashes of all its full hash units.
        """
        if not self._any:
            return
        length, size = sequence.tokens.size, self._block_size
        start = length // self.unit * self.unit
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
            index.children.add(RadixChild(sequence.tokens[start:].tobytes(), tuple(hashes), parent, first_page))


def _one(page: int) -> np.ndarray:
    return np.array([page], np.int32)
