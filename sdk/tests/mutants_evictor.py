"""Evictors with one planted fault each, in the place of the reference driver's body."""

from __future__ import annotations

from typing import Any

import numpy as np
from mutant_suites import suites_of

from engine.builtin.evictor_lru.body import LRU
from engine_sdk.conformance import EvictorConformance


class DoubleFree(LRU):
    """double free: a victim stays a candidate, and is given up again"""

    def victims(self, n: int, group: int) -> np.ndarray:
        head, stamps, count = self._head, self._stamps.copy(), self._len
        found = super().victims(n, group)
        self._head, self._stamps, self._len = head, stamps, count
        return found


class TwiceAtOnce(LRU):
    """a page stands twice among the victims of one call"""

    def victims(self, n: int, group: int) -> np.ndarray:
        found = super().victims(n, group)
        return np.append(found[:-1], found[:1]) if found.size > 1 else found


class Unranked(LRU):
    """unranked victims: they come in order of their numbers"""

    def victims(self, n: int, group: int) -> np.ndarray:
        candidates = np.flatnonzero(self._stamps)[:n].astype(np.int32)
        self.on_touch(candidates)
        return candidates


class FrontFirst(LRU):
    """a sequence is given up from its beginning"""

    def on_release(self, pages: np.ndarray) -> None:
        super().on_release(pages[::-1])


class SortsEachCall(LRU):
    """victims are ranked within a call only: their order depends on how many are asked for"""

    def victims(self, n: int, group: int) -> np.ndarray:
        return np.sort(super().victims(n, group))[::-1].copy()


class TakesHeldPages(LRU):
    """a touched page is given up all the same"""

    def on_touch(self, pages: np.ndarray) -> None:
        self._len -= int(np.count_nonzero(self._stamps[pages]))


class ForgetsTouch(LRU):
    """only the first page of a touch is taken out"""

    def on_touch(self, pages: np.ndarray) -> None:
        super().on_touch(pages[:1])


class OneMore(LRU):
    """one victim more than was asked for"""

    def victims(self, n: int, group: int) -> np.ndarray:
        return super().victims(n + 1, group)


class OneLess(LRU):
    """the last candidate is never given up"""

    def victims(self, n: int, group: int) -> np.ndarray:
        return super().victims(min(n, max(0, len(self) - 1)), group)


class CommitsAreCandidates(LRU):
    """pages are candidates from their commit on, while a request holds them"""

    def on_commit(self, pages: np.ndarray, parents: np.ndarray) -> None:
        self.on_release(pages)


class CountsReleases(LRU):
    """len counts releases, not candidates"""

    def __len__(self) -> int:
        return self._clock


class ResetKeeps(LRU):
    """reset forgets the count, and keeps the queue"""

    def reset(self) -> None:
        self._len = 0


class NeverCompacts(LRU):
    """releases that find no room in the queue are lost"""

    def on_release(self, pages: np.ndarray) -> None:
        if self._tail + pages.size <= self._pages.size:
            super().on_release(pages)


class GivesLists(LRU):
    """victims are a list, not an array"""

    def victims(self, n: int, group: int) -> Any:
        return super().victims(n, group).tolist()


class NullPage(LRU):
    """the null page is among the victims when there are too few"""

    def victims(self, n: int, group: int) -> np.ndarray:
        found = super().victims(n, group)
        return np.append(found, np.zeros(n - found.size, np.int32)).astype(np.int32)


class CommittedOnce(LRU):
    """a page that is committed anew, after its content was discarded, is never given up"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.known: set[int] = set()
        self.lost: set[int] = set()

    def on_commit(self, pages: np.ndarray, parents: np.ndarray) -> None:
        self.lost |= self.known.intersection(pages.tolist())
        self.known.update(pages.tolist())

    def on_release(self, pages: np.ndarray) -> None:
        super().on_release(np.array([page for page in pages.tolist() if page not in self.lost], np.int32))

    def victims(self, n: int, group: int) -> np.ndarray:
        found = super().victims(n, group)
        self.known.difference_update(found.tolist())
        return found

    def reset(self) -> None:
        super().reset()
        self.known.clear()
        self.lost.clear()


MUTANTS = [
    DoubleFree, TwiceAtOnce, Unranked, FrontFirst, SortsEachCall, TakesHeldPages, ForgetsTouch, OneMore, OneLess,
    CommitsAreCandidates, CountsReleases, ResetKeeps, NeverCompacts, GivesLists, NullPage, CommittedOnce,
]  # fmt: skip

globals().update(suites_of(EvictorConformance, "lru", MUTANTS))
