"""Evictors with one planted fault each, in the place of the bodies of `lru` and `cacheblend`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from mutant_suites import suites_of

from engine.interfaces.context import CoreContext
from engine.interfaces.evictor import Reuse
from engine_blend.chunks import Chunks
from engine_reference.evictor_lru import LRU
from engine_sdk.conformance import EvictorConformance


class DoubleFree(LRU):
    """double free: a victim stays a candidate, and is given up again"""

    def victims(self, n: int, table: int) -> np.ndarray:
        head, stamps, count = self._head, self._stamps.copy(), self._len
        found = super().victims(n, table)
        self._head = head
        self._stamps = stamps
        self._len = count
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

    retain = None  # type: ignore[assignment]

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.again = LRU(context)
        self.hashes = [b""] * context.num_pages
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


# -- of what is retained ---------------------------------------------------------------------------------------------
class RetainsNothing(LRU):
    """what is to be retained is heard, and goes as everything else"""

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        pass


class RetainsForEver(LRU):
    """the time of what is retained is never over"""

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        super().retain(pages, priorities, np.where(until > 0, np.inf, 0))


class LowestLast(LRU):
    """of retained pages those of the highest priority go first"""

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        super().retain(pages, -priorities, until)


class ReleasesNothing(LRU):
    """what is said not to be retained any more is so all the same"""

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        kept = until > 0
        super().retain(pages[kept], priorities[kept], until[kept])


class RetainsCandidates(LRU):
    """what is held while it is said to be retained is not"""

    def retain(self, pages: np.ndarray, priorities: np.ndarray, until: np.ndarray) -> None:
        there = self._stamps[pages] > 0
        super().retain(pages[there], priorities[there], until[there])


class NeverLetsGo(LRU):
    """retained pages are not given up where nothing else is left"""

    def victims(self, n: int, table: int) -> np.ndarray:
        lowest = self._retained.lowest
        self._retained.lowest = lambda n: np.empty(0, np.int32)  # type: ignore[method-assign]
        found = super().victims(n, table)
        self._retained.lowest = lowest  # type: ignore[method-assign]
        return found


class RetainsThePage(LRU):
    """a page is retained whatever it holds meanwhile"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._retained.forget = lambda pages: None  # type: ignore[method-assign]


class ResetRetains(LRU):
    """a reset keeps what is retained"""

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        super().reset()
        self._retained = self.kept

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.kept = self._retained
        self.kept.reset = lambda: self.kept.take_back(self.kept.aside())  # type: ignore[method-assign]


class ForgetsThoseAside(LRU):
    """retained pages that were passed over stay so when a request finds them, and are given up while it holds them"""

    def on_touch(self, pages: np.ndarray) -> None:
        super().on_touch(pages[~np.isin(pages, self._retained.aside())])


class ChecksOnceOnly(LRU):
    """a page that was passed over once is no candidate any more when its time is over"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._retained.over = lambda n: np.empty(0, np.int32)  # type: ignore[method-assign]


RETAINING = [
    RetainsNothing, RetainsForEver, LowestLast, ReleasesNothing, RetainsCandidates, NeverLetsGo, RetainsThePage,
    ResetRetains, ForgetsThoseAside, ChecksOnceOnly,
]  # fmt: skip


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


class OneBlockEarly(Chunks):
    """a chunk lies a block before the one that holds its first token"""

    def reuse(self, root: bytes, tokens: np.ndarray, start: int) -> list[Reuse]:
        found = super().reuse(root, tokens, start)
        return [span._replace(position=max(0, span.position - 16)) for span in found]


class WholeChunks(Chunks):
    """a chunk is reused whole, though the cached prefix ends within it"""

    def reuse(self, root: bytes, tokens: np.ndarray, start: int) -> list[Reuse]:
        return [span for span in super().reuse(root, tokens, 0) if span.end > start]


class EverybodysChunks(Chunks):
    """what one tenant has computed, another reuses"""

    def remember(self, root: bytes, tokens: np.ndarray, hashes: Sequence[bytes]) -> None:
        super().remember(b"", tokens, hashes)

    def reuse(self, root: bytes, tokens: np.ndarray, start: int) -> list[Reuse]:
        return super().reuse(b"", tokens, start)


class KeepsChunks(Chunks):
    """reset keeps the chunks"""

    def reset(self) -> None:
        chunks = self._chunks.copy()
        super().reset()
        self._chunks = chunks


class AllChunksEver(Chunks):
    """every chunk that ever was is kept"""

    def __init__(self, context: CoreContext) -> None:
        super().__init__(context)
        self._most = 1 << 60


REUSING = [OneBlockEarly, WholeChunks, EverybodysChunks, KeepsChunks, AllChunksEver]
REMEMBERING = [RemembersForEver, GhostsReturn, CountsOneQueue]
ORDERING = [
    DoubleFree, TwiceAtOnce, Unranked, FrontFirst, SortsEachCall, TakesHeldPages, TiresOfTouches, SmallCounters,
    ForgetsTouch, OneMore, OneLess, CommitsAreCandidates, CountsReleases, ResetKeeps, NeverCompacts, GivesLists,
    NullPage, CommittedOnce,
]  # fmt: skip
MUTANTS = [*ORDERING, *REMEMBERING, *REUSING, *RETAINING]

globals().update(suites_of(EvictorConformance, "lru", [*ORDERING, *REMEMBERING, *RETAINING]))
globals().update(suites_of(EvictorConformance, "cacheblend", REUSING))


class TestTwoQueues(EvictorConformance):
    """What the last mutants are made of passes."""

    driver = "lru"

    @classmethod
    def body(cls) -> type:
        return TwoQueues
