"""The pages: who holds them, which are free, which wait for a step under way, which the evictor may give up.

Every page but the null page is in exactly one state:

    held       somebody's block table names it (reference count > 0)
    deferred   nobody holds it, but a step under way names it: it may not be reused before that step is done
    evictable  nobody holds it and it has cached content: the evictor orders these
    free       nobody holds it and it has no cached content

The evictor is told once a step (`take`), in arrays: new cached pages, then touches, then releases; then it is asked for
victims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.types.errors import ContractError
from engine.types.kv import MOST_HOLDERS, NULL_PAGE, PageMap

if TYPE_CHECKING:
    from engine.interfaces.evictor import Evictor
    from engine.kv.index import PrefixIndex

_EMPTY = np.empty(0, np.int32)


class PagePool:
    """Counts and states of `num_pages` pages, page 0 (the null page) included, which is never given out.

    Args:
        num_pages: of the workers' pool.
        index: pages that are given up are taken out of it.
        evictor: the driver that orders the evictable ones.
    """

    def __init__(self, num_pages: int, index: PrefixIndex, evictor: Evictor) -> None:
        self.num_pages = num_pages
        self.done_step = 0
        self.refs = np.zeros(num_pages, np.int32)
        self.committed = np.zeros(num_pages, bool)
        self.evictable = np.zeros(num_pages, bool)
        self.num_evictable = 0
        self.num_deferred_free = 0
        self.num_evicted = 0  # since start
        self._index = index
        self._evictor = evictor
        self._free = np.arange(num_pages - 1, NULL_PAGE - 1, -1, dtype=np.int32)  # a stack: its end is taken first
        self.num_free = num_pages - 1
        self._last_step = np.zeros(num_pages, np.int64)  # the last step that names the page, where it is not done
        self._deferred_until = np.zeros(num_pages, np.int64)  # 0: not deferred
        self._deferred_free: dict[int, list[np.ndarray]] = {}
        self._place = np.zeros(num_pages, np.int64)  # scratch of `_once`
        self.leases: dict[int, np.ndarray] = {}  # those that have not been given back
        self._lease_numbers = itertools.count(1)
        # What the evictor knows, and what it has still to be told.
        self._known = np.zeros(num_pages, bool)
        self._commits: list[tuple[np.ndarray, np.ndarray]] = []
        self._touches: list[np.ndarray] = []
        self._untold = 0  # pages among the touches that the evictor takes for evictable
        self._releases: list[np.ndarray] = []

    @property
    def num_usable(self) -> int:
        """All pages but the null page."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that could be taken now."""
        return self.num_free + self.num_evictable

    @property
    def num_held(self) -> int:
        """Pages that a request or a step under way needs."""
        return self.num_usable - self.num_available

    def page_map(self) -> PageMap:
        """A copy of who holds what now, for monitors."""
        holders = np.minimum(self.refs, MOST_HOLDERS).astype(np.uint8)
        told = {"holders": holders, "cached": self.committed, "retained": self._index.retained()}
        return PageMap(**{name: of_pages[NULL_PAGE + 1 :].tobytes() for name, of_pages in told.items()})

    # -- held ---------------------------------------------------------------------------------------------------------
    def hold(self, pages: np.ndarray) -> None:
        """One more holder for each of these committed pages (no page twice): a prefix hit takes them back."""
        self.refs[pages] += 1
        pending = pages[self._deferred_until[pages] > 0]
        if pending.size:
            self._deferred_until[pending] = 0
            self.num_deferred_free -= pending.size
        taken = pages[self.evictable[pages]]
        if taken.size:
            self.evictable[taken] = False
            self.num_evictable -= taken.size
            told = taken[self._known[taken]]
            self._known[told] = False
            self._untold += told.size
        if pages.size:
            self._touches.append(pages)  # those that others hold too: evictors may count how often a page is found

    def pin(self, pages: np.ndarray) -> None:
        """One more holder for each of these pages, which others hold: they are given back by `release`."""
        assert (self.refs[pages] > 0).all()
        self.refs[pages] += 1

    def lend(self, pages: np.ndarray, taken: bool = False) -> int:
        """Keep these pages, as `pin`, none twice, until they are given back: a transfer reads them or writes into them,
        whatever becomes of who held them. Returns the lease's number.

        taken: they come from `take` or `hold`, which is undone when they are given back.
        """
        if not taken:
            self.pin(pages)
        lease = next(self._lease_numbers)
        self.leases[lease] = pages
        return lease

    def give_back(self, lease: int) -> None:
        """The transfer has ended, by itself or by its failure."""
        self.release(self.leases.pop(lease), 0)

    def release(self, pages: np.ndarray, last_steps: np.ndarray | int) -> None:
        """One holder less for each of these pages, in the order of the sequence (a page may stand here twice).

        Args:
            last_steps: int [n] or one int; the last step in which that holder was planned.
        """
        if not pages.size:
            return
        np.subtract.at(self.refs, pages, 1)
        np.maximum.at(self._last_step, pages, last_steps)
        pages = pages[self.refs[pages] == 0]
        until = self._last_step[pages]
        waiting = until > self.done_step
        if not np.count_nonzero(waiting):
            self._let_go(self._once(pages))
            return
        self._let_go(self._once(pages[~waiting]))
        pages, until = pages[waiting], until[waiting]
        fresh = self._once(pages[self._deferred_until[pages] == 0])
        self.num_deferred_free += fresh.size
        self._deferred_until[pages] = until
        for step in np.unique(until).tolist():
            self._deferred_free.setdefault(step, []).append(pages[until == step])

    def step_done(self, step_id: int) -> None:
        """This step, and all before it, no longer name any page."""
        self.done_step = step_id
        if not self._deferred_free:
            return
        for step in [step for step in self._deferred_free if step <= step_id]:
            pages = np.concatenate(self._deferred_free.pop(step))
            pages = self._once(pages[self._deferred_until[pages] == step])  # others were taken back meanwhile
            self._deferred_until[pages] = 0
            self.num_deferred_free -= pages.size
            self._let_go(pages)

    def _let_go(self, pages: np.ndarray) -> None:
        cached = self.committed[pages]
        kept = pages[cached]
        if kept.size:
            self.evictable[kept] = True
            self.num_evictable += kept.size
            self._releases.append(kept)
        if kept.size < pages.size:
            self._push_free(pages[~cached])

    def _push_free(self, pages: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + pages.size] = pages
        self.num_free += pages.size

    # -- cached content -----------------------------------------------------------------------------------------------
    def commit(self, pages: np.ndarray, parents: np.ndarray) -> None:
        """The index now names these held pages; parents: the page before each in its sequence, 0 for none."""
        if pages.size:
            self.committed[pages] = True
            self._commits.append((pages, parents))

    def discard(self, pages: np.ndarray) -> None:
        """Nobody finds these committed pages (none twice) any more. Who holds one keeps it; the others become free."""
        self.hold(pages)  # so that the evictor hears that they are not evictable
        self._tell_commits()  # while the index knows what they hold
        self._index.forget(pages)
        self.committed[pages] = False
        self.release(pages, 0)

    def forget_content(self) -> None:
        """No page has cached content any more; evictable pages become free."""
        self._push_free(np.flatnonzero(self.evictable).astype(np.int32))
        self.evictable[:] = False
        self.committed[:] = False
        self._known[:] = False
        self.num_evictable = 0
        self._commits = []
        self._touches = []
        self._releases = []
        self._untold = 0
        self._evictor.reset()

    # -- giving out ---------------------------------------------------------------------------------------------------
    def take(self, counts: Sequence[int]) -> list[np.ndarray]:
        """Pages for each table, with one holder each; tells the evictor what happened since the last call.

        Args:
            counts: for each KV table; their sum is at most `num_available`.

        Raises ContractError: the evictor gave pages that are not evictable, or fewer than it was asked for.
        """
        self.tell_evictor()
        assert sum(counts) <= self.num_available
        taken, given_up = [], []
        for table, count in enumerate(counts):
            if not count:
                taken.append(_EMPTY)
                continue
            n = min(count, self.num_free)
            self.num_free -= n
            pages = self._free[self.num_free : self.num_free + n][::-1].copy()
            if n < count:
                victims = self._victims(count - n, table)
                given_up.append(victims)
                pages = np.concatenate([pages, victims]) if n else victims
            taken.append(pages)
        if given_up:
            self._give_up(np.concatenate(given_up))
        for pages in taken:
            self.refs[pages] = 1
        return taken

    def _victims(self, n: int, table: int) -> np.ndarray:
        pages = np.asarray(self._evictor.victims(n, table), dtype=np.int32)
        if pages.size != n:
            raise self._bad_victims(f"gave {pages.size} pages to give up for KV table {table}", f"{n}")
        return pages

    def _give_up(self, pages: np.ndarray) -> None:
        n = pages.size
        if np.count_nonzero(self.evictable[pages]) < n or self._once(pages).size < n:
            raise self._bad_victims("gave pages that are not evictable, or one twice", f"{n} pages to give up")
        self.evictable[pages] = False
        self.committed[pages] = False
        self._known[pages] = False
        self.num_evictable -= n
        self.num_evicted += n
        self._index.forget(pages)

    def _bad_victims(self, found: str, asked: str) -> ContractError:
        found = f"the evictor {type(self._evictor).__name__} {found}"
        return ContractError(asked, found, "choose another evictor driver and tell its author", point="evictor")

    def tell_evictor(self) -> None:
        """What happened to evictable pages since the last time. `take` does it first; a step that takes nothing may."""
        self._tell_commits()
        if self._touches:
            touches = self._once(np.concatenate(self._touches))
            self._touches = []
            self._untold = 0
            self._evictor.on_touch(touches)
        if self._releases:
            pages = np.concatenate(self._releases)
            self._releases = []
            pages = pages[self.evictable[pages]]  # others were taken back meanwhile
            pages = self._once(pages[::-1])[::-1]  # a page that was taken back and released again counts by its last
            if pages.size:
                self._known[pages] = True
                self._evictor.on_release(pages)

    def _tell_commits(self) -> None:
        if self._commits:
            pages, parents = (np.concatenate(part) for part in zip(*self._commits, strict=True))
            self._commits = []
            self._evictor.on_commit(pages, parents, self._index.keys_of(pages))

    def _once(self, pages: np.ndarray) -> np.ndarray:
        """Each page once, at its first place."""
        places = np.arange(pages.size)
        self._place[pages[::-1]] = places[::-1]
        first = self._place[pages] == places
        return pages if np.count_nonzero(first) == pages.size else pages[first]

    def check_integrity(self, expected_refs: np.ndarray) -> None:
        """Raise AssertionError where states contradict each other or `expected_refs`, int [num_pages], the holders
        without leases."""
        expected_refs = expected_refs.copy()
        for lent in self.leases.values():
            expected_refs[lent] += 1
        wrong = np.flatnonzero(self.refs != expected_refs)
        assert not wrong.size, f"reference counts of pages {wrong[:8]} are {self.refs[wrong[:8]]}"
        free = self._free[: self.num_free]
        states = np.zeros(self.num_pages, np.int32)
        np.add.at(states, free, 1)
        states += self.refs > 0
        states += self.evictable
        states += self._deferred_until > 0
        assert (states[1:] == 1).all(), f"pages {np.flatnonzero(states[1:] != 1)[:8] + 1} are lost or in two states"
        assert states[NULL_PAGE] == 0 and not self.committed[NULL_PAGE], "the null page was given out"
        assert int(self.evictable.sum()) == self.num_evictable
        assert int((self._deferred_until > 0).sum()) == self.num_deferred_free
        waited_for = self._deferred_until[self._deferred_until > 0]
        assert (waited_for > self.done_step).all(), "a page waits for a finished step"
        assert not self.committed[free].any() and self.committed[self.evictable].all()
        assert len(self._evictor) == int(self._known.sum()) + self._untold, "the evictor counts other pages"
        assert self.evictable[self._known].all()
        self._evictor.check_integrity()
