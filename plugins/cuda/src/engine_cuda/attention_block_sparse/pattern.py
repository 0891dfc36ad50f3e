"""Which blocks of keys a query sees: the fixed patterns of BlockSparse FlashAttention (Dao et al. 2022, section 3.3) in
the form of Phi-3-small (Abdin et al. 2024), with the first blocks as sinks (Xiao et al. 2023)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Pattern(NamedTuple):
    """A query in block b sees of block c <= b, where c < sinks, or c > b - local, or (c + 1 + shift) % stride == 0.

    Args:
        block: tokens of a block.
        local: blocks up to a query's own, at least 1.
        stride: 0 for no strided blocks.
        sinks: first blocks.
        homo_head: the shift is 0 for all heads; else `shift`.
    """

    block: int
    local: int
    stride: int
    sinks: int
    homo_head: bool

    @property
    def shifts(self) -> bool:
        """Whether heads see different blocks."""
        return self.stride > 1 and not self.homo_head

    def step(self, num_heads: int) -> int:
        """Blocks between the strided ones of a head and the next head's, of so many heads of the whole model."""
        return max(1, self.stride // num_heads) if self.shifts else 0

    def shift(self, head: int, num_heads: int) -> int:
        """Of a head: how many blocks earlier its strided ones are."""
        return head * self.step(num_heads) % self.stride if self.shifts else 0

    def seen(self, own: int, shift: int) -> np.ndarray:
        """The blocks that a query in block `own` sees, ascending; the last one is its own."""
        first_local = max(0, own - self.local + 1)
        sinks = min(self.sinks, first_local)
        parts = [np.arange(sinks), np.arange(first_local, own + 1)]
        if self.stride:
            last = self.stride - 1 - shift
            first = last + max(0, -(-(sinks - last) // self.stride)) * self.stride
            parts.insert(1, np.arange(first, first_local, self.stride))
        return np.concatenate(parts)
