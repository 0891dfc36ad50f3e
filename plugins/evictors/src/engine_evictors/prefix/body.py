"""Leaves of the prefix tree first, those of least value first of all.

The tree: page p's parent is the page that holds the block before p's in the sequence that committed it. A candidate is
ripe when it has no cached child. Ripe candidates lie in a heap by value, whose entries die when their page is touched,
and are dropped when they come up.

A page's value is the time of its release (a clock that counts released pages) plus a bonus for being shared: for every
sequence that branched off after it, `share_weight` turnovers of the cache. As in GreedyDual (Young, 1994; Cao and
Irani, 1997) the clock overtakes every bonus, so that nothing stays for ever. Sharing is counted at branches and not
at hits, because a conversation finds its own pages with every turn, and those are of no use once it has ended.

A leaf that comes up while it is retained is put aside, see `engine_kit.retained_pages`, and comes back into the heap
when its time is over. As long as it is cached, the pages before it do not ripen.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from engine_kit.retained_pages import RetainedPages

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine_evictors.prefix.card import PrefixOptions

_NONE = 0
"""The null page is nobody's parent, and no candidate's stamp."""


class Prefix:
    """The order of candidates; see `engine.interfaces.evictor.RetainingEvictor`."""

    def __init__(self, context: CoreContext) -> None:
        options: PrefixOptions = context.options
        self._limit = options.share_limit
        self._bonus = options.share_weight * context.num_pages
        """Of one branch, in ticks of the clock."""
        self._clock = 0
        self._num_pages = context.num_pages
        self._retained = RetainedPages(context.num_pages, context.clock.monotonic)
        self.reset()

    def reset(self) -> None:
        n = self._num_pages
        self._cached = [False] * n
        self._parent = [_NONE] * n
        self._children = [0] * n
        """Cached ones."""
        self._ever = [0] * n
        """Children that it ever had, given up or not."""
        self._shares = [0] * n
        """Sequences that branched off at or below it."""
        self._stamp = [_NONE] * n
        """The clock at a candidate's release; _NONE where the page is no candidate."""
        self._value = [0.0] * n
        self._heap: list[tuple[float, int, int]] = []
        """(value, stamp, page) of ripe candidates, and of some that are so no more."""
        self._len = 0
        self._retained.reset()

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Hang new leaves into the tree. A page that is committed anew holds other content: its past is forgotten."""
        self._retained.forget(pages)
        for page, parent in zip(pages.tolist(), parents.tolist(), strict=True):
            if self._cached[page]:
                self._cut(page)
            self._cached[page] = True
            self._ever[page] = self._shares[page] = 0
            if self._cached[parent]:
                self._parent[page] = parent
                self._children[parent] += 1
                self._ever[parent] += 1
                if self._ever[parent] > 1:
                    self._count_branch(parent)

    def _count_branch(self, page: int) -> None:
        """Another sequence goes on after this page: it and all before it are shared once more."""
        while page and self._shares[page] < self._limit:
            self._shares[page] += 1
            page = self._parent[page]

    def on_touch(self, pages: np.ndarray) -> None:
        """No candidates for now."""
        self._retained.take_back(pages)
        for page in pages.tolist():
            if self._stamp[page]:
                self._stamp[page] = _NONE
                self._len -= 1

    def on_release(self, pages: np.ndarray) -> None:
        """Candidates again; those without children are ripe at once."""
        for page in reversed(pages.tolist()):
            self._clock += 1
            if not self._stamp[page]:
                self._len += 1
            self._stamp[page] = self._clock
            self._value[page] = self._clock + self._bonus * self._shares[page]
            if not self._children[page]:
                heappush(self._heap, (self._value[page], self._clock, page))
        if len(self._heap) > 4 * self._len + 64:
            self._heap = [entry for entry in self._heap if self._stamp[entry[2]] == entry[1]]
            heapify(self._heap)

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        self._retained.retain(pages, priorities, until)

    def victims(self, n: int, table: int) -> np.ndarray:
        """The n least valuable leaves; a parent ripens when its last child goes."""
        found: list[int] = []
        for page in self._retained.over(self._num_pages).tolist():
            heappush(self._heap, (self._value[page], self._stamp[page], page))
        while len(found) < n and self._len:
            page = self._ripest()
            found.append(page)
            self._stamp[page] = _NONE
            self._len -= 1
            self._cut(page)
        victims = np.array(found, np.int32)
        self._retained.forget(victims)
        return victims

    def _ripest(self) -> int:
        """Take the best entry off the heap, or where all ripe ones are retained, the one of the lowest priority. Where
        every candidate has a cached child that is no candidate (a request holds the end of a sequence whose beginning
        left its sliding window), the oldest candidate goes."""
        while self._heap:
            value, stamp, page = heappop(self._heap)
            if self._stamp[page] != stamp or self._children[page]:
                continue
            one = np.array([page], np.int32)
            if not self._retained.among(one)[0]:
                return page
            self._retained.take_back(one)  # it may have ripened anew
            self._retained.put_aside(one, np.array([value]))
        while len(self._retained):
            (page,) = self._retained.lowest(1).tolist()
            if not self._children[page]:
                return page  # the others come into the heap when their last child goes
        return min((page for page, stamp in enumerate(self._stamp) if stamp), key=self._stamp.__getitem__)

    def _cut(self, page: int) -> None:
        """Take a page out of the tree. Its parent may ripen; children that it had become roots."""
        parent = self._parent[page]
        self._cached[page] = False
        self._parent[page] = _NONE
        if parent:
            self._children[parent] -= 1
            if not self._children[parent] and self._stamp[parent]:
                heappush(self._heap, (self._value[parent], self._stamp[parent], parent))
        if self._children[page]:
            for child, above in enumerate(self._parent):
                if above == page:
                    self._parent[child] = _NONE
            self._children[page] = 0

    def __len__(self) -> int:
        return self._len

    def check_integrity(self) -> None:
        children = [0] * len(self._parent)
        for page, parent in enumerate(self._parent):
            if parent:
                assert self._cached[page] and self._cached[parent], f"page {page} hangs on page {parent}"
                children[parent] += 1
        assert children == self._children
        assert sum(stamp != _NONE for stamp in self._stamp) == self._len
        assert all(self._cached[page] for page, stamp in enumerate(self._stamp) if stamp)
        living = {page for _, stamp, page in self._heap if self._stamp[page] == stamp}
        living.update(self._retained.aside().tolist())
        self._retained.check_integrity()
        ripe = {page for page, stamp in enumerate(self._stamp) if stamp and not self._children[page]}
        assert ripe <= living, f"ripe pages {sorted(ripe - living)[:8]} are not in the heap"
