"""The KV manager: finds cached prefixes, gives out pages, caches what was computed, takes back what is not needed.

A step gets its pages by `engine.kv.reservation.Reservation`; here is what lasts from step to step.

A block counts as cached once its tokens are known and a plan that computes it is made: steps run in order and write a
layer's keys and values before they read any, so whoever finds it in the same plan or a later one reads it whole. A hit
may end within a block (`engine.kv.cached_blocks`): then the plan copies pages, whose sources are held until its step is
done.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.kv.cached_blocks import CachedBlocks
from engine.kv.hashing import HASH_FUNCTIONS, Hashed, extend_hashes
from engine.kv.index import BlockKey, KVEventLog, PrefixIndex
from engine.kv.matching import Hit, RunningTokens, Sequence, match, no_hit
from engine.kv.pool import PagePool
from engine.kv.reuse import Reuses
from engine.kv.tables import BlockTable, spans
from engine.types.kv import KVLayout

if TYPE_CHECKING:
    from engine.interfaces.evictor import Evictor, ReusingEvictor


class KVManager:
    """Pages and block tables of all slots.

    Args:
        layout: the pool's form.
        num_pages: of the workers' pool, the null page included.
        max_num_seqs: slots.
        max_model_len: tokens of the longest request.
        evictor: orders what is given up.
        enable_prefix_caching: False: nothing is hashed, committed or found.
        hash_algo: a name in `engine.kv.hashing.HASH_FUNCTIONS`.
        reuses: the evictor finds what is no prefix, too; of one table with prefix caching.

    Attributes:
        tables: one for each of the layout's.
        reuses: what it finds; None where it does not.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_pages: int,
        max_num_seqs: int,
        max_model_len: int,
        evictor: Evictor,
        enable_prefix_caching: bool = True,
        hash_algo: str = "xxhash",
        reuses: bool = False,
    ) -> None:
        assert all(table.tokens_per_block == layout.block_size for table in layout.tables)
        self.layout = layout
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex(num_pages, len(layout.tables))
        self.pool = PagePool(num_pages, self.index, evictor)
        self.tables = tuple(BlockTable(table, max_num_seqs, max_model_len) for table in layout.tables)
        self._sliding = tuple(table for table in self.tables if table.window is not None)
        self.num_resets = 0
        self.digest = HASH_FUNCTIONS[hash_algo]
        self.blocks = CachedBlocks(self.index, self.pool, self.tables, self.block_size, self.digest, max_num_seqs)
        self.reuses: Reuses | None = None
        if reuses:
            self.reuses = Reuses(cast("ReusingEvictor", evictor), self.index, self.pool, *self.tables)

    # -- questions ----------------------------------------------------------------------------------------------------
    def fits_at_all(self, num_tokens: int) -> bool:
        """Whether a request of this length could be computed with the whole pool to itself."""
        return self.pages_at_least(num_tokens) <= self.pool.num_usable

    def pages_at_least(self, num_tokens: int) -> int:
        """Pages that a request of this length needs, computed one token at a time."""
        return sum(table.most_live(num_tokens, 1) for table in self.tables)

    def match(
        self,
        sequence: Sequence,
        max_tokens: int,
        running: RunningTokens | None = None,
        planned: Set[BlockKey] = frozenset(),
    ) -> Hit:
        """The longest cached prefix: whole blocks (`engine.kv.matching.match`), then a partial block
        (`engine.kv.cached_blocks`).

        Args:
            sequence: its hashes are extended in place where more are needed.
            max_tokens: the most to be found.
            running: the tokens of all slots; without it no partial blocks of running requests are found.
            planned: keys of blocks that the plan under construction computes.
        """
        hit, size = no_hit(self.tables), self.block_size
        if self.enable_prefix_caching:
            hashes = sequence.hashes
            extend_hashes(hashes, sequence.root, sequence.tokens, size, digest=self.digest)
            if hashes:
                hit = match(self.index, planned, self.tables, hashes, block_size=size, max_tokens=max_tokens)
            hit = self.blocks.extend(hit, sequence, max_tokens, running)
        return hit

    def pages_for_prompt(self, num_tokens: int, chunk: int, hit: Hit) -> int:
        """Pages that admitting a request takes from those available: its new pages until all `num_tokens` tokens are
        computed in chunks of `chunk`, and what the hit takes."""
        pages = self.pages_taken_by(hit)
        for table, found in zip(self.tables, hit.tables, strict=True):
            pages += max(0, table.most_live(num_tokens, chunk) - found.pages.size)
        return pages

    def pages_to_finish(self, slot: int, num_tokens: int, chunk: int) -> int:
        """Pages that a slot still needs until all its `num_tokens` tokens are computed in chunks of `chunk`."""
        return sum(
            max(0, table.most_live(num_tokens, chunk) - int(table.num_blocks[slot] - table.first_block[slot]))
            for table in self.tables
        )

    def pages_held_alone(self, slots: np.ndarray) -> np.ndarray:
        """Pages that only this slot holds, of each slot: int [n]."""
        alone = np.zeros(slots.size, np.int64)
        for table in self.tables:
            first = table.first_block[slots]
            place, block = spans(first, table.num_blocks[slots] - first)
            alone += np.bincount(place, self.pool.refs[table.pages[slots[place], block]] == 1, slots.size).astype(int)
        return alone

    # -- pages of running slots --------------------------------------------------------------------------------------
    def leave_window(self, slots: np.ndarray, positions: np.ndarray, last_steps: np.ndarray) -> None:
        """Give back the blocks that left the sliding windows of slots that go on at `positions`.

        last_steps: int [n]; the last step that names each slot.
        """
        for table in self._sliding:
            pages, places = table.leave_window(slots, positions)
            if pages.size:
                self.pool.release(pages, last_steps[places])

    def decode_need(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which slots need a page to compute the one token at their position: bool [tables, n]."""
        need = np.empty((len(self.tables), slots.size), bool)
        for of_table, table in zip(need, self.tables, strict=True):
            np.less_equal(table.num_blocks[slots] * table.tokens_per_block, positions, out=of_table)
        return need

    def extend_need(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Pages that each slot needs to have room for `ends` tokens, int [n]: int [tables, n]."""
        blocks = [(ends - 1) // table.tokens_per_block + 1 for table in self.tables]
        have = [table.num_blocks[slots] for table in self.tables]
        return np.stack([np.maximum(all_of - n, 0) for all_of, n in zip(blocks, have, strict=True)])

    # -- afterwards ---------------------------------------------------------------------------------------------------
    def record_events(self) -> None:
        """Write down from now on what happens to the prefix cache; `index.events.take()` gives it."""
        self.index.events = KVEventLog(self.pool.num_pages)

    def trim(self, slots: np.ndarray, num_tokens: np.ndarray, last_step: int) -> None:
        """Give back the pages past `num_tokens` tokens, int [n], of these slots: those of drafts that were rejected.

        last_step: the last step that names the slots.
        """
        released = []
        for table in self.tables:
            blocks = (num_tokens - 1) // table.tokens_per_block + 1
            row, block = spans(blocks, table.num_blocks[slots] - blocks)
            if row.size:
                released.append(table.pages[slots[row], block])
                table.num_blocks[slots] = blocks
        if released:
            self.pool.release(np.concatenate(released), last_step)

    def free_slot(
        self,
        slot: int,
        last_step: int,
        filled: int = 0,
        sequences: Sequences[Hashed | None] = (),
        tokens: np.ndarray | None = None,
    ) -> None:
        """Give back everything that a slot holds.

        Args:
            last_step: the last step that names it.
            filled, sequences, tokens: as for `CachedBlocks.cache_full_blocks`; the slot's last block is cached too
                where it is filled in part. 0 caches nothing.
        """
        if filled and self.blocks.caches(slot):
            assert tokens is not None
            self.blocks.cache_full_blocks(np.array([slot]), np.array([filled]), sequences, tokens)
            held = sequences[slot]
            assert held is not None
            sequence = Sequence(held.hashes, held.root, tokens[slot, :filled], held.lora_id)
            self.blocks.cache_partial_block(slot, sequence)
            if self.reuses is not None:
                self.reuses.remember(sequence)
        if self.reuses is not None:
            self.reuses.end(slot, last_step)
        for table in self.tables:
            self.pool.release(table.clear(slot), last_step)
        self.blocks.end(slot)

    def distrust(self, slot: int, sequence: Sequence) -> None:
        """Some keys or values of a slot's sequence are not numbers, and nobody knows which: nothing more of the slot
        is cached, and nobody finds what the prefix cache has of the sequence. Who holds these pages keeps them.

        sequence: all its known tokens.
        """
        self.blocks.end(slot)
        self._discard(self.blocks.hashes_of(sequence))

    def forget(self, pages: np.ndarray) -> list[int]:
        """These pages, int32 [n], do not hold what they should: nobody finds them, nor what chains on them. Who holds
        pages keeps them. Returns the slots that hold some, or have reused some."""
        cached = self.index.keys_of(np.unique(pages[self.pool.committed[pages]]))
        hashes = {key[: len(self.digest(b""))] for key in cached}
        hashes.update(self.index.children.below(hashes))
        self._discard(hashes)
        holders: set[int] = set() if self.reuses is None else self.reuses.readers(pages, hashes)
        for table in self.tables:  # what has left a window since is still in the table
            there = np.isin(table.pages, pages) & (np.arange(table.pages.shape[1]) < table.num_blocks[:, None])
            holders.update(np.flatnonzero(there.any(axis=1)).tolist())
        return sorted(holders)

    def _discard(self, hashes: Iterable[bytes]) -> None:
        """Nobody finds blocks under these hashes."""
        keys = [self.index.key(hashed, table.index) for table in self.tables for hashed in hashes]
        pages = {page for key in keys if (page := self.index.page_of(key)) is not None}
        self.pool.discard(np.array(sorted(pages), np.int32))

    def step_done(self, step_id: int) -> None:
        """This step, and all before it, have ended."""
        self.pool.step_done(step_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Of requests that are running nothing more is cached."""
        self.num_resets += 1
        self.index.clear()
        self.pool.forget_content()
        self.blocks.end_all()

    def check_integrity(self) -> None:
        """Raise AssertionError where block tables, counts, index and evictor contradict each other."""
        refs = np.zeros(self.pool.num_pages, np.int32)
        for table in self.tables:
            assert (table.first_block <= table.num_blocks).all()
            for slot in np.flatnonzero(table.num_blocks).tolist():
                np.add.at(refs, table.live(slot), 1)
        if self.reuses is not None:
            self.reuses.count(refs)
        self.pool.check_integrity(refs)
        self.index.check_integrity(self.pool.committed)

    def check_slot(self, slot: int, num_tokens: int) -> None:
        """Raise AssertionError unless the slot has blocks for so many tokens."""
        for table in self.tables:
            assert table.num_blocks[slot] == table.blocks(num_tokens), f"slot {slot} has not the blocks that it needs"

    # -- helpers, also of `engine.kv.reservation` ----------------------------------------------------------------------
    def pages_taken_by(self, hit: Hit) -> int:
        """Pages that using a hit takes from those available: its own that nobody holds, and new ones for what is to be
        loaded."""
        pages = [table.pages for table in hit.tables]
        if hit.partial is not None:
            pages.append(hit.partial.sources)
        evictable = sum(int(np.count_nonzero(self.pool.evictable[of_table])) for of_table in pages)
        return evictable + hit.num_missing
