"""Evictors with one planted fault each, in the place of the reference driver's body."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from mutant_suites import suites_of

from engine_reference.evictor_lru import LRU
from engine_sdk.conformance import EvictorConformance


class DoubleFree(LRU):
    """double free: a victim stays a candidate, and is given up again"""

    def victims(self, n: int, table: int) -> np.ndarray:
        head, stamps, count = self._head, self._stamps.copy(), self._len
        found = super().victims(n, table)
        self._head, self._stamps, self._len = head, stamps, count
        return found


class TwiceAtOnce(LRU):
    """a page stands twice among the victims of one call"""

    def victims(self, n: int, table: int) -> np.ndarray:
        found = super().victims(n, table)
        return np.append(found[:-1], found[:1]) if found.size > 1 else found


class Unranked(LRU):
    """unranked victims: they come in order of their numbers"""

    def victims(self, n: int, table: int) -> np.ndarray:
        candidates = np.flatnonzero(self._stamps)[:n].astype(np.int32)
        self.on_touch(candidates)
        return candidates


class FrontFirst(LRU):
    """a sequence is given up from its beginning"""

    def on_release(self, pages: np.ndarray) -> None:
        super().on_release(pages[::-1])


class SortsEachCall(LRU):
    """victims are ranked within a call only: their order depends on how many are asked for"""

    def victims(self, n: int, table: int) -> np.ndarray:
        return np.sort(super().victims(n, table))[::-1].copy()


class TakesHeldPages(LRU):
    """a touched page is given up all the same"""

    def on_touch(self, pages: np.ndarray) -> None:
        self._len -= int(np.count_nonzero(self._stamps[pages]))


class TiresOfTouches(LRU):
    """from the thousandth touch on, touched pages are given up all the same"""

    count = 0

    def on_touch(self, pages: np.ndarray) -> None:
        self.count += 1
        if self.count < 1000:
            super().on_touch(pages)
        else:
            self._len -= int(np.count_nonzero(self._stamps[pages]))


class SmallCounters(LRU):
    """a page's touches are counted in eight bits: every 256th is taken for none"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._touches = np.zeros(context.num_pages, np.uint8)

    def on_touch(self, pages: np.ndarray) -> None:
        self._touches[pages] += 1
        super().on_touch(pages[self._touches[pages] > 0])


class ForgetsTouch(LRU):
    """only the first page of a touch is taken out"""

    def on_touch(self, pages: np.ndarray) -> None:
        super().on_touch(pages[:1])


class OneMore(LRU):
    """one victim more than was asked for"""

    def victims(self, n: int, table: int) -> np.ndarray:
        return super().victims(n + 1, table)


class OneLess(LRU):
    """the last candidate is never given up"""

    def victims(self, n: int, table: int) -> np.ndarray:
        return super().victims(min(n, max(0, len(self) - 1)), table)


class CommitsAreCandidates(LRU):
    """pages are candidates from their commit on, while a request holds them"""

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
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

    def victims(self, n: int, table: int) -> Any:
        return super().victims(n, table).tolist()


class NullPage(LRU):
    """the null page is among the victims when there are too few"""

    def victims(self, n: int, table: int) -> np.ndarray:
        found = super().victims(n, table)
        return np.append(found, np.zeros(n - found.size, np.int32)).astype(np.int32)


class CommittedOnce(LRU):
    """a page that is committed anew, after its content was discarded, is never given up"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.known: set[int] = set()
        self.lost: set[int] = set()

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        self.lost |= self.known.intersection(pages.tolist())
        self.known.update(pages.tolist())

    def on_release(self, pages: np.ndarray) -> None:
        super().on_release(np.array([page for page in pages.tolist() if page not in self.lost], np.int32))

    def victims(self, n: int, table: int) -> np.ndarray:
        found = super().victims(n, table)
        self.known.difference_update(found.tolist())
        return found

    def reset(self) -> None:
        super().reset()
        self.known.clear()
        self.lost.clear()


# -- of one that remembers -------------------------------------------------------------------------------------------
class TwoQueues(LRU):
    """Right: 2Q (Johnson, Shasha 1994). What comes back soon after it was given up goes after all that is new."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.again, self.hashes = LRU(context), [b""] * context.num_pages
        self.known = np.zeros(context.num_pages, bool)
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.most = context.num_pages

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        for page, hashed in zip(pages.tolist(), hashes, strict=True):
            self.hashes[page], self.known[page] = hashed, hashed in self.ghosts
            self.ghosts.pop(hashed, None)

    def on_touch(self, pages: np.ndarray) -> None:
        super().on_touch(pages)
        self.again.on_touch(pages)

    def on_release(self, pages: np.ndarray) -> None:
        super().on_release(pages[~self.known[pages]])
        self.again.on_release(pages[self.known[pages]])

    def victims(self, n: int, table: int) -> np.ndarray:
        first = super().victims(n, table)
        found = np.append(first, self.again.victims(n - first.size, table))
        self.ghosts.update((self.hashes[page], None) for page in found.tolist())
        self.forget_some()
        return found

    def forget_some(self) -> None:
        while len(self.ghosts) > self.most:
            self.ghosts.popitem(last=False)

    def __len__(self) -> int:
        return self._len + len(self.again)

    def reset(self) -> None:
        super().reset()
        self.again.reset()
        self.ghosts.clear()

    def check_integrity(self) -> None:
        super().check_integrity()
        self.again.check_integrity()


class RemembersForEver(TwoQueues):
    """the hash of every page that was ever given up is kept"""

    def forget_some(self) -> None:
        pass


class GhostsReturn(TwoQueues):
    """what comes back is a candidate from its commit on, while a request holds it"""

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        super().on_commit(pages, parents, hashes)
        self.again.on_release(pages[self.known[pages]])


class CountsOneQueue(TwoQueues):
    """len leaves out what came back"""

    def __len__(self) -> int:
        return self._len


REMEMBERING = [RemembersForEver, GhostsReturn, CountsOneQueue]
ORDERING = [
    DoubleFree, TwiceAtOnce, Unranked, FrontFirst, SortsEachCall, TakesHeldPages, TiresOfTouches, SmallCounters,
    ForgetsTouch, OneMore, OneLess, CommitsAreCandidates, CountsReleases, ResetKeeps, NeverCompacts, GivesLists,
    NullPage, CommittedOnce,
]  # fmt: skip
MUTANTS = [*ORDERING, *REMEMBERING]

globals().update(suites_of(EvictorConformance, "lru", MUTANTS))


class TestTwoQueues(EvictorConformance):
    """What the last mutants are made of passes."""

    driver = "lru"

    @classmethod
    def body(cls) -> type:
        return TwoQueues
