"""Full blocks on their way into the prefix cache, once their tokens are known and a plan that computes them is made."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from engine.kv.hashing import Digest, Hashed, extend_hashes
from engine.kv.index import PrefixIndex
from engine.kv.partial_blocks import NO_TAIL, PartialBlocks
from engine.kv.pool import PagePool
from engine.kv.tables import BlockTable, spans
from engine.types.kv import NULL_PAGE

_NEVER = np.iinfo(np.int32).max


class FullBlocks:
    """Names pages in the index, and tells the evictor, the partial blocks and who listens. No block is offered twice.

    Args:
        index, pool, partial_blocks: the manager's.
        tables: of the groups that grow with the sequence.
        block_size: tokens of the hash unit.
        digest: the hash function.
        num_slots: slots.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pool: PagePool,
        partial_blocks: PartialBlocks,
        tables: tuple[BlockTable, ...],
        block_size: int,
        digest: Digest,
        num_slots: int,
    ) -> None:
        self._index = index
        self._pool = pool
        self._partial_blocks = partial_blocks
        self._tables = tables
        self._block_size = block_size
        self._unit = partial_blocks.unit
        self._digest = digest
        # Hash units of each slot that were offered to the index.
        self._num_cached = np.full(num_slots, _NEVER, np.int32)
        self._unit_hashes = self._unit // block_size
        self._block_places = np.arange(block_size, 0, -1)
        self._unit_places = np.arange(self._unit, 0, -1)

    # -- which slots --------------------------------------------------------------------------------------------------
    def begin(self, slot: int, num_tokens: int) -> None:
        """A slot's blocks are cached from now on; those of its first tokens are already."""
        self._num_cached[slot] = num_tokens // self._block_size

    def caches(self, slot: int) -> bool:
        """Whether the slot's blocks are cached."""
        return bool(self._num_cached[slot] != _NEVER)

    def end(self, slot: int) -> None:
        """Nothing more of the slot is cached."""
        self._num_cached[slot] = _NEVER

    def end_all(self) -> None:
        """Nothing more of any running slot is cached, nor are partial blocks copied from it."""
        self._num_cached[:] = _NEVER
        self._partial_blocks.tail_hash[:] = [NO_TAIL] * len(self._partial_blocks.tail_hash)

    # -- caching ------------------------------------------------------------------------------------------------------
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
                self._partial_blocks.tail_hash[slot] = hashes[units - 1] if units else held.root
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
            self._partial_blocks.add_unit(end, sequences[row], data[i : i + size], page)

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
