"""For evictors that retain: which pages are retained until when, and which of the candidates were passed over.

An evictor keeps its queue as ever. A candidate whose turn has come and that is retained is put aside. One whose time is
over has been passed over by its queue, so that it is the next to go; where the queue is empty, those aside go by
priority.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np


class RetainedPages:
    """Retention of all pages, and the candidates that are aside, in arrays.

    Args:
        num_pages: of the pool, the null page included.
        now: `CoreContext.clock.monotonic`.
    """

    def __init__(self, num_pages: int, now: Callable[[], float]) -> None:
        self.now = now
        self._priorities = np.zeros(num_pages, np.int32)
        self._until = np.zeros(num_pages)
        self._aside = np.zeros(num_pages, bool)
        self._order = np.zeros(num_pages)  # of those aside, the evictor's
        self._some = False  # no page is retained before this is true
        self._num_aside = 0
        self._next_end = math.inf  # the time of no page aside is over before

    def __len__(self) -> int:
        """How many candidates are aside."""
        return self._num_aside

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        """See `engine.interfaces.evictor.RetainingEvictor.retain`."""
        self._some = True
        self._priorities[pages] = priorities
        self._until[pages] = until
        if (of_aside := until[self._aside[pages]]).size:
            self._next_end = min(self._next_end, float(of_aside.min()))

    def forget(self, pages: np.ndarray) -> None:
        """These pages hold other content now, or none."""
        if self._some:
            self._until[pages] = 0
            self.take_back(pages)

    def reset(self) -> None:
        """Nothing is retained, and nothing aside."""
        self._some = False
        self._until[:] = 0
        self._aside[:] = False
        self._num_aside = 0
        self._next_end = math.inf

    def among(self, pages: np.ndarray) -> np.ndarray:
        """Which of these pages are retained: bool [n]."""
        if not self._some:
            return np.zeros(len(pages), bool)
        return np.asarray(self._until[pages] > self.now())

    def put_aside(self, pages: np.ndarray, order: np.ndarray) -> None:
        """These candidates, none aside, are retained; order: by which they would have gone, lower values first."""
        if pages.size:
            self._aside[pages] = True
            self._order[pages] = order
            self._num_aside += pages.size
            self._next_end = min(self._next_end, float(self._until[pages].min()))

    def take_back(self, pages: np.ndarray) -> None:
        """Pages, none twice, that are aside no more, if they were."""
        if self._num_aside:
            self._num_aside -= int(np.count_nonzero(self._aside[pages]))
            self._aside[pages] = False

    def over(self, n: int) -> np.ndarray:
        """Take up to n of those aside whose time is over, in their order: int32 [m]."""
        if not self._num_aside or (now := self.now()) < self._next_end:
            return np.empty(0, np.int32)
        pages = self.aside()
        over = self._until[pages] <= now
        pages, left = pages[over], pages[~over]
        ended = cast(np.ndarray, pages[np.argsort(self._order[pages], kind="stable")])
        ends = self._until[np.append(left, ended[n:])]
        self._next_end = float(ends.min()) if ends.size else math.inf
        self.take_back(ended[:n])
        return ended[:n]

    def lowest(self, n: int) -> np.ndarray:
        """Take up to n of those aside by their priority, of equals by their order: int32 [m]."""
        pages = self.aside()
        pages = pages[np.lexsort((self._order[pages], self._priorities[pages]))][:n]
        self.take_back(pages)
        return pages

    def aside(self) -> np.ndarray:
        """The candidates that are aside: int32 [m]."""
        return np.flatnonzero(self._aside).astype(np.int32)

    def check_integrity(self) -> None:
        """Raise AssertionError where counts and arrays disagree."""
        pages = self.aside()
        assert pages.size == self._num_aside
        assert (self._until[pages] >= self._next_end).all(), "nobody would see that its time is over"
