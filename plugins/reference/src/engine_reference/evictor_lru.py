"""Evictor `lru`: least recently used first.

It is a queue of (page, stamp) in arrays, whose entries die when their page is touched.

A release writes a new stamp for each page and appends it to the queue; a touch sets the page's stamp to 0, so that its
entry no longer counts; victims are the first entries whose stamp still stands. When the queue's buffer is full, the
living entries move to its front. Each page passes through a constant number of array operations.

An entry that comes up while its page is retained leaves the queue, see `engine_kit.retained_pages`. What is aside was
released before all that is in the queue, so that pages whose time is over go in the order of a queue without retention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.evictor import EvictorCard
from engine_kit.retained_pages import RetainedPages

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext

_LEAST_CAPACITY = 256


class LRUEvictor(EvictorCard):
    """Gives up the pages that were released longest ago; of one sequence, its end first."""

    body = "engine_reference.evictor_lru:LRU"


class LRU:
    """The order of candidates; see `engine.interfaces.evictor.RetainingEvictor`."""

    def __init__(self, context: CoreContext) -> None:
        self._stamps = np.zeros(context.num_pages, np.int64)  # 0: no candidate
        capacity = max(_LEAST_CAPACITY, 4 * context.num_pages)
        self._pages = np.empty(capacity, np.int32)
        self._queued = np.empty(capacity, np.int64)
        self._head = self._tail = 0
        self._clock = 0
        self._retained = RetainedPages(context.num_pages, context.clock.monotonic)
        self._len = 0

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Nothing to remember: order is by release alone. What the pages held was retained, and is not there."""
        self._retained.forget(pages)

    def on_touch(self, pages: np.ndarray) -> None:
        self._len -= int(np.count_nonzero(self._stamps[pages]))
        self._stamps[pages] = 0
        self._retained.take_back(pages)

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

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        self._retained.retain(pages, priorities, until)

    def victims(self, n: int, table: int) -> np.ndarray:
        found = [self._retained.over(n)]
        wanted = n - found[0].size
        while wanted and self._head < self._tail:
            end = min(self._head + wanted, self._tail)
            pages = self._pages[self._head : end]
            pages = pages[self._stamps[pages] == self._queued[self._head : end]]
            self._head = end
            retained = self._retained.among(pages)
            self._retained.put_aside(pages[retained], self._stamps[pages[retained]])
            found.append(pages[~retained])
            wanted -= found[-1].size
        if wanted and len(self._retained):
            found.append(self._retained.lowest(wanted))
        victims = np.concatenate(found)
        self._stamps[victims] = 0
        self._retained.forget(victims)
        self._len -= victims.size
        return victims

    def __len__(self) -> int:
        return self._len

    def reset(self) -> None:
        self._stamps[:] = 0
        self._head = self._tail = self._len = 0
        self._retained.reset()

    def check_integrity(self) -> None:
        pages = self._pages[self._head : self._tail]
        living = pages[self._stamps[pages] == self._queued[self._head : self._tail]]
        living = np.append(living, self._retained.aside())
        assert np.unique(living).size == living.size == self._len == np.count_nonzero(self._stamps)
        self._retained.check_integrity()

    def _compact(self) -> None:
        """Move the living entries, at most one a page, to the front of the buffer."""
        pages, queued = self._pages[self._head : self._tail], self._queued[self._head : self._tail]
        living = self._stamps[pages] == queued
        pages, queued = pages[living], queued[living]
        self._pages[: pages.size], self._queued[: pages.size] = pages, queued
        self._head = 0
        self._tail = pages.size
