"""Evictor `lru`: least recently used first.

It is a queue of (page, stamp) in arrays, whose entries die when their page is touched.

A release writes a new stamp for each page and appends it to the queue; a touch sets the page's stamp to 0, so that its
entry no longer counts; victims are the first entries whose stamp still stands. When the queue's buffer is full, the
living entries move to its front. Each page passes through a constant number of array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.evictor import EvictorCard

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext

_LEAST_CAPACITY = 256


class LRUEvictor(EvictorCard):
    """Gives up the pages that were released longest ago; of one sequence, its end first."""

    body = "engine_reference.evictor_lru:LRU"


class LRU:
    """The order of candidates; see `engine.interfaces.evictor.Evictor`."""

    def __init__(self, context: CoreContext) -> None:
        self._stamps = np.zeros(context.num_pages, np.int64)  # 0: no candidate
        capacity = max(_LEAST_CAPACITY, 4 * context.num_pages)
        self._pages = np.empty(capacity, np.int32)
        self._queued = np.empty(capacity, np.int64)
        self._head = self._tail = 0
        self._clock = 0
        self._len = 0

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Nothing to remember: order is by release alone."""

    def on_touch(self, pages: np.ndarray) -> None:
        self._len -= int(np.count_nonzero(self._stamps[pages]))
        self._stamps[pages] = 0

    def on_release(self, pages: np.ndarray) -> None:
        """The array is queued from its end: a sequence's end is of use to fewer requests."""
        n = pages.size
        if self._tail + n > self._pages.size:
            self._compact()
        stamps = np.arange(self._clock + 1, self._clock + n + 1)
        self._clock += n
        self._len += n - int(np.count_nonzero(self._stamps[pages]))
        end = self._tail + n
        self._pages[self._tail : end] = pages[::-1]
        self._queued[self._tail : end] = stamps
        self._stamps[pages[::-1]] = stamps
        self._tail = end

    def victims(self, n: int, table: int) -> np.ndarray:
        found: list[np.ndarray] = []
        wanted = n
        while wanted and self._head < self._tail:
            end = min(self._head + wanted, self._tail)
            pages = self._pages[self._head : end]
            pages = pages[self._stamps[pages] == self._queued[self._head : end]]
            self._head = end
            wanted -= pages.size
            found.append(pages)
        victims = np.concatenate(found) if found else np.empty(0, np.int32)
        self._stamps[victims] = 0
        self._len -= victims.size
        return victims

    def __len__(self) -> int:
        return self._len

    def reset(self) -> None:
        self._stamps[:] = 0
        self._head = self._tail = self._len = 0

    def check_integrity(self) -> None:
        pages = self._pages[self._head : self._tail]
        living = pages[self._stamps[pages] == self._queued[self._head : self._tail]]
        assert np.unique(living).size == living.size == self._len == np.count_nonzero(self._stamps)

    def _compact(self) -> None:
        """Move the living entries, at most one a page, to the front of the buffer."""
        pages, queued = self._pages[self._head : self._tail], self._queued[self._head : self._tail]
        living = self._stamps[pages] == queued
        pages, queued = pages[living], queued[living]
        self._pages[: pages.size], self._queued[: pages.size] = pages, queued
        self._head = 0
        self._tail = pages.size
