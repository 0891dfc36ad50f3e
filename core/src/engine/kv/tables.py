"""Block tables: for one KV table of the layout, which page holds which block of each slot's sequence."""

from __future__ import annotations

import numpy as np

from engine.types.kv import KVTable

_EMPTY = np.empty(0, np.int32)


class BlockTable:
    """The block tables of all slots, for layers that share them.

    Blocks `first_block[slot] .. num_blocks[slot] - 1` of a slot hold pages; those before have left the sliding window
    (or were never needed), and their entries are stale.

    Args:
        table: whose blocks these are.
        num_slots: rows.
        max_tokens: the longest sequence.
    """

    def __init__(self, table: KVTable, num_slots: int, max_tokens: int) -> None:
        self.index = table.index
        self.kind = table.kind
        self.tokens_per_block = table.tokens_per_block
        self.window = table.window
        max_blocks = -(-max_tokens // self.tokens_per_block)
        self.pages = np.zeros((num_slots, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.first_block = np.zeros(num_slots, np.int32)

    # -- arithmetic ---------------------------------------------------------------------------------------------------
    def blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of this length."""
        return -(-num_tokens // self.tokens_per_block)

    def first_needed(self, position: int) -> int:
        """The first block that a query at this position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.tokens_per_block

    def most_live(self, num_tokens: int, chunk: int) -> int:
        """The most blocks held at once while `num_tokens` tokens are computed in chunks of `chunk`."""
        blocks = self.blocks(num_tokens)
        if self.window is None:
            return blocks
        span = self.window - 1 + min(chunk, num_tokens)  # tokens seen by a chunk, itself included, on any alignment
        return min(blocks, (span + self.tokens_per_block - 2) // self.tokens_per_block + 1)

    def live(self, slot: int) -> np.ndarray:
        """The pages that the slot holds, in order."""
        return self.pages[slot, self.first_block[slot] : self.num_blocks[slot]]

    # -- change -------------------------------------------------------------------------------------------------------
    def append(self, slot: int, pages: np.ndarray) -> int:
        """Add blocks at the end; returns the index of the first of them."""
        start = int(self.num_blocks[slot])
        self.pages[slot, start : start + pages.size] = pages
        self.num_blocks[slot] = start + pages.size
        return start

    def clear(self, slot: int) -> np.ndarray:
        """Empty a slot; returns the pages that it held, in order."""
        held = self.live(slot).copy()
        self.num_blocks[slot] = self.first_block[slot] = 0
        return held

    def leave_window(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop the blocks that queries at `positions` and later no longer see.

        Args:
            slots, positions: int [n]; each slot once, with the first position that it computes next.

        Returns (pages [m], places in `slots` [m]) of what was dropped.
        """
        if self.window is None:
            return _EMPTY, _EMPTY
        needed = np.maximum(positions - (self.window - 1), 0) // self.tokens_per_block
        first = self.first_block[slots]
        places, blocks = spans(first, np.maximum(needed - first, 0))
        if not places.size:
            return _EMPTY, _EMPTY
        left = slots[places]
        self.first_block[left] = blocks + 1  # of a slot's blocks the last one comes last
        return self.pages[left, blocks], places


def spans(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each i the blocks first[i], first[i] + 1, ..., counts[i] >= 0 of them: (i, block), int [sum of counts]."""
    row = counts.nonzero()[0]
    if row.size and np.maximum.reduce(counts) > 1:  # `counts.max()` calls the same by a detour
        row = np.repeat(row, counts[row])
        ends = counts.cumsum()
        return row, (np.arange(row.size) - (ends - counts - first)[row]).astype(np.int32)
    return row, first[row]
