"""Pages that are lent to transfers."""

from __future__ import annotations

import numpy as np

from engine.kv.pool import PagePool


class Leases:
    """Pages that stay as they are until they are given back: a transfer reads them or writes into them, whatever
    becomes of who held them.

    Args:
        pool: of the pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[int, np.ndarray] = {}
        self._last = 0

    def __len__(self) -> int:
        """Those that have not been given back."""
        return len(self._pages)

    def lend(self, pages: np.ndarray) -> int:
        """Lend pages, int32, no page twice, each of which somebody holds now. Returns the lease's number."""
        self._pool.pin(pages)
        self._last += 1
        self._pages[self._last] = pages
        return self._last

    def give_back(self, lease: int) -> None:
        """The transfer has ended, by itself or by its failure."""
        self._pool.release(self._pages.pop(lease), 0)

    def count(self, refs: np.ndarray) -> None:
        """Add to each page's holders, int32 [num_pages], the leases of it."""
        for pages in self._pages.values():
            np.add.at(refs, pages, 1)
