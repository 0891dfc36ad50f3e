"""Which blocks of the slots are in the prefix cache: full ones, and partly filled last ones.

A full block is cached once its tokens are known and a plan that computes it is made.

A hit in whole blocks goes on within a block where cached tokens follow that share a beginning with the request's: in a
block that goes on otherwise, in the partly filled last block of a sequence that has ended, or in that of one that runs.
The request gets fresh pages, and the step copies the content into them before it does anything else.

Blocks of all tables have the same tokens, so a page of each table is copied. A model with a "state" table has no
partial blocks: of a block's tokens it keeps the state after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from engine.kv.hashing import Digest, Hashed, extend_hashes, partial_hash
from engine.kv.index import PrefixIndex
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
        tables: the manager's.
        block_size: tokens of a block.
        digest: the hash function.
        num_slots: slots.

    Attributes:
        tail_hash: for each slot the hash after its last cached block; `NO_TAIL` where it may not be copied from.
        computed_limit: int32 [num_slots]; while the slot's prompt is under way, its tokens that plans already made
            compute; then more than it will ever have.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pool: PagePool,
        tables: tuple[BlockTable, ...],
        block_size: int,
        digest: Digest,
        num_slots: int,
    ) -> None:
        self._index = index
        self._pool = pool
        self._tables = tables
        self._block_size = block_size
        self._digest = digest
        self._has_partial = all(table.kind != "state" for table in tables)
        self._num_cached = np.full(num_slots, _NEVER, np.int32)  # blocks of each slot that the index was offered
        self._block_places = np.arange(block_size, 0, -1)
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
            hashes = held.hashes
            if len(hashes) == blocks - 1:
                before = hashes[-1] if hashes else held.root
                hashes.append(digest(before + data[4 * i * size : 4 * (i + 1) * size]))
            else:
                extend_hashes(hashes, held.root, tokens[slot, : blocks * size], size, digest=digest)
            mine.append(held)
            self.tail_hash[slot] = hashes[blocks - 1]
        for table in self._tables:
            first = np.maximum(start, table.first_block[slots])
            row, block = spans(first, np.maximum(end - first, 0))
            of_row = slots[row]
            # The page before, where the slot still holds it and the index names that one.
            parents = table.pages[of_row, block - 1]
            parents[(block == table.first_block[of_row]) | ~self._pool.committed[parents]] = NULL_PAGE
            self._cache_blocks(table, mine, slots, tokens, row, block, table.pages[of_row, block], parents)

    def cache_loaded(self, table: int, held: Hashed, tokens: np.ndarray, blocks: np.ndarray, pages: np.ndarray) -> None:
        """Put blocks of a sequence without a slot, int [n], ascending, into the prefix cache: these pages of a table
        hold them. tokens: int32 [m]; the sequence's, with hashes of all its full blocks."""
        row = np.zeros(blocks.size, np.int64)
        before = np.zeros(blocks.size, np.int32)
        self._cache_blocks(self._tables[table], [held], row[:1], tokens[None], row, blocks, pages, before)

    def _cache_blocks(
        self,
        table: BlockTable,
        sequences: list[Hashed],
        slots: np.ndarray,
        tokens: np.ndarray,
        rows: np.ndarray,
        blocks: np.ndarray,
        pages: np.ndarray,
        before: np.ndarray,
    ) -> None:
        """Name the pages of these blocks where the index names no other for them.

        Args:
            sequences: n of them, in `slots`, int [n]; tokens: of all slots.
            rows: int [m]; whose block it is, among the sequences.
            before: the pages of the blocks before these, as far as they are known without a look into the index.
        """
        index = self._index
        held = [(sequences[row], block) for row, block in zip(rows.tolist(), blocks.tolist(), strict=True)]
        keys = index.keys([sequence.hashes[block] for sequence, block in held], table.index)
        new = index.add(keys, pages.tolist())
        if not new:
            return
        if len(new) < pages.size:
            rows, blocks, pages, before = rows[new], blocks[new], pages[new], before[new]
            held = [held[place] for place in new]
        for i in ((before == NULL_PAGE) & (blocks > 0)).nonzero()[0].tolist():
            sequence, block = held[i]
            before[i] = index.page_of(index.key(sequence.hashes[block - 1], table.index)) or NULL_PAGE
        self._pool.commit(pages, before)
        if not table.index:
            self._add_children(held, slots[rows], tokens, blocks, pages)
        if index.events is not None:
            self._tell_stored(table.index, held, slots[rows].tolist(), tokens, pages.tolist())

    def _add_children(
        self,
        held: list[tuple[Hashed, int]],
        slots: np.ndarray,
        tokens: np.ndarray,
        blocks: np.ndarray,
        pages: np.ndarray,
    ) -> None:
        """The first table's blocks that the index did not know, (sequence, block) each: others may share a beginning
        with them."""
        size, add = self._block_size, self._index.children.add
        data = tokens[slots[:, None], ((blocks + 1) * size)[:, None] - self._block_places].tobytes()
        for i, ((sequence, block), page) in enumerate(zip(held, pages.tolist(), strict=True)):
            hashes = sequence.hashes
            parent = hashes[block - 1] if block else sequence.root
            add((data[4 * i * size : 4 * (i + 1) * size], hashes[block], parent, page))

    def _tell_stored(
        self, table: int, held: list[tuple[Hashed, int]], slots: list[int], tokens: np.ndarray, pages: list[int]
    ) -> None:
        """Blocks, (sequence, block) each, were committed; those that follow one another are one event."""
        assert self._index.events is not None
        size, begin = self._block_size, 0
        for i, (sequence, block) in enumerate(held, 1):
            if i < len(held) and held[i][0] is sequence and held[i][1] == block + 1:
                continue
            first, hashes = held[begin][1], sequence.hashes
            self._index.events.stored(
                table,
                list(zip(pages[begin:i], hashes[first : block + 1], strict=True)),
                hashes[first - 1] if first else None,
                tokens[slots[begin], first * size : (block + 1) * size],
                size,
                sequence.lora_id,
            )
            begin = i

    # -- partial blocks ------------------------------------------------------------------------------------------------
    def extend(self, hit: Hit, sequence: Sequence, max_tokens: int, running: RunningTokens | None) -> Hit:
        """The hit with the longest partial block that can be had, of at most `max_tokens` tokens in all."""
        start = hit.num_tokens
        most = min(self._block_size, max_tokens - start) if self._has_partial else 0
        if most < 1:
            return hit
        parent = sequence.before(start // self._block_size)
        wanted = sequence.tokens[start : start + most]
        partial = self._cached(parent, wanted)
        if running is not None:
            partial = self._running(parent, wanted, start, running, partial)
        return hit if partial is None else Hit(start + partial.num_tokens, hit.tables, partial)

    def _cached(self, parent: bytes, wanted: np.ndarray) -> PartialBlock | None:
        index = self._index
        for n, (_, hashed, _, _) in index.children.nearest(parent, wanted.tobytes()):
            pages = [index.page_of(index.key(hashed, table.index)) for table in self._tables]
            if None not in pages:
                return PartialBlock(n, np.array(pages, np.int32), cached=True)
        return None

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
            block = start // self._block_size
            if all(table.first_block[slot] <= block for table in self._tables):
                sources = np.array([table.pages[slot, block] for table in self._tables], np.int32)
                return PartialBlock(n, sources, cached=False)
        return best

    def hashes_of(self, sequence: Sequence) -> set[bytes]:
        """The hashes under which full and partly filled blocks of this sequence may be cached."""
        size, found = self._block_size, set(sequence.hashes)
        for block in range(min(-(-sequence.tokens.size // size), len(sequence.hashes) + 1)):
            tokens = sequence.tokens[block * size : (block + 1) * size].tobytes()
            children = self._index.children.beginnings(sequence.before(block), tokens)
            found.update(hashed for _, hashed, _, _ in children)
        return found

    def cache_partial_block(self, slot: int, sequence: Sequence) -> None:
        """Put the slot's tokens after its last whole block into the prefix cache; its pages are given back next.

        sequence: its tokens as far as they are known and computed; hashes of all its full blocks.
        """
        length, size = sequence.tokens.size, self._block_size
        last = length // size
        start = last * size
        if not self._has_partial or start == length or any(table.first_block[slot] > last for table in self._tables):
            return
        index, pool, tokens = self._index, self._pool, sequence.tokens[start:]
        parent = sequence.before(last)
        hashed = partial_hash(parent, tokens, digest=self._digest)
        for table in self._tables:
            key, page = index.key(hashed, table.index), int(table.pages[slot, last])
            if index.add([key], [page]):
                before = index.page_of(index.key(parent, table.index)) if last else None
                pool.commit(_one(page), _one(before or NULL_PAGE))
        first = index.page_of(index.key(hashed, 0))
        assert first is not None
        index.children.add((tokens.tobytes(), hashed, parent, first))


def _one(page: int) -> np.ndarray:
    return np.array([page], np.int32)
