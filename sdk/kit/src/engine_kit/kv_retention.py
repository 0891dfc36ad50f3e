"""Cached pages that are given up after all others, as requests ask by `kv_retention`, and how many of them there may be
(entry-point group `engine_parts`).

A request that asks for it leaves a grant when it ends: so many whole blocks of its tokens, from the first, until a
time, by a priority. Of several grants on a page the latest time and the highest priority count. The order in which
pages are given up is the evictor's, which is told of both; here is what no evictor decides: whose they are, and the
bounds. Where there would be too many, grants end: of the key that has too many, or where all together have, of the one
that has the most; first the lowest priority, of these the one whose time is over first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.types.retention import KVRetention

PINNED = 1 + KVRetention.MOST_PRIORITY
"""The priority of pinned pages."""
DEFAULT_TTL = 300.0
"""Seconds: of who does not say how long. Pinned pages stay until they are released."""


def begin(kv: Any, evictor: Any, now: Callable[[], float], share: float, share_of_key: float) -> None:
    """Let a core's requests retain pages, or write down why they may not.

    Args:
        kv: its KV manager.
        share, share_of_key: of the pool that may be retained, in all and for one key.
    """
    pool, index = kv.pool, kv.index
    if not kv.enable_prefix_caching:
        index.retains_not = "it caches no prefixes"
    elif not share:
        index.retains_not = "its operator allows none (--max-kv-retention 0)"
    elif getattr(evictor, "retain", None) is None:
        index.retains_not = f"its evictor {type(evictor).__name__} retains nothing"
    else:
        index.retention = Retention(kv, evictor, now, int(share * pool.num_usable), int(share_of_key * pool.num_usable))


@dataclass(eq=False, slots=True)
class _Grant:
    key: str
    session: str | None
    last: bytes  # the hash of its last block
    pages: np.ndarray
    lives: np.ndarray  # of the pages, when it was made: another life is other content
    priority: int
    until: float


class Retention:
    """Grants, by key (an API key, or a cache salt).

    Args:
        kv: the core's KV manager.
        evictor: a `engine.interfaces.evictor.RetainingEvictor`.
        now: the core's clock.
        most, most_of_key: pages that may be retained in all, and for one key.

    Attributes:
        counts: pages whose time is over ("expired"), that were given up before because nothing else was left
            ("given_up"), and that lost their retention to a bound ("displaced"), since start.
    """

    def __init__(self, kv: Any, evictor: Any, now: Callable[[], float], most: int, most_of_key: int) -> None:
        num_pages = kv.pool.num_pages
        self._kv = kv
        self._evictor = evictor
        self.most = most
        self.most_of_key = min(most, most_of_key)
        self.counts = Counter(expired=0, given_up=0, displaced=0)
        self._now = now
        self._lives = np.zeros(num_pages, np.int64)
        self._grants_on = np.zeros(num_pages, np.int32)
        self._priority = np.zeros(num_pages, np.int32)
        self._until = np.zeros(num_pages)
        self._grants: dict[str, dict[bytes, _Grant]] = {}  # of each key, by the last block
        self._pages: dict[str, Counter[int]] = {}  # of each key: on how many of its grants
        self._total = 0
        self._next_end = math.inf  # no grant's time is over before
        self._shown: tuple[tuple[str, int], ...] | None = ()

    # -- requests that end --------------------------------------------------------------------------------------------
    def ended(self, cache_salt: str | None, hashes: list[bytes], wishes: Sequence[KVRetention]) -> None:
        """A request with these hashes of full blocks has ended and given its pages back: they are kept as it wishes.

        cache_salt: whose it is, where a wish does not say that.
        """
        self.expire()
        keys = [cache_salt or "" if wish.key is None else wish.key for wish in wishes]
        for key, wish in zip(keys, wishes, strict=True):
            if wish.session is not None:
                for grant in list(self._grants.get(key, {}).values()):
                    if grant.session == wish.session:
                        self._end(grant)
        for key, wish in zip(keys, wishes, strict=True):
            of_wish = hashes if wish.tokens is None else hashes[: wish.tokens // self._kv.block_size]
            if not wish.release:
                self._retain(key, of_wish, wish)
            else:
                for grant in self._ending_on(key, of_wish):
                    self._end(grant)

    def _retain(self, key: str, hashes: list[bytes], wish: KVRetention) -> None:
        """Add a grant: so many blocks, from the first, as the bound of its key allows. A weaker one of this key that
        ends on one of these is a part of it."""
        pages = self._pages_of(hashes)
        while (more := pages.size - self.most_of_key) > 0:
            hashes = hashes[: -max(1, more // len(self._kv.tables))]
            pages = self._pages_of(hashes)
        if not pages.size:
            return
        priority = PINNED if wish.pin else wish.priority
        until = self._now() + (wish.ttl or (math.inf if wish.pin else DEFAULT_TTL))
        for grant in self._ending_on(key, hashes):
            if grant.last == hashes[-1]:
                priority, until = max(priority, grant.priority), max(until, grant.until)
            if grant.priority <= priority and grant.until <= until:
                self._end(grant)
        grant = _Grant(key, wish.session, hashes[-1], pages, self._lives[pages], priority, until)
        self._grants.setdefault(key, {})[grant.last] = grant
        self._pages.setdefault(key, Counter()).update(pages.tolist())
        self._total += int(np.count_nonzero(self._grants_on[pages] == 0))
        self._grants_on[pages] += 1
        self._priority[pages] = np.maximum(self._priority[pages], priority)
        self._until[pages] = np.maximum(self._until[pages], until)
        self._next_end = min(self._next_end, until)
        self._changed(pages)
        while len(self._pages.get(key, ())) > self.most_of_key:
            self._displace(key)
        while self._total > self.most:
            self._displace(max(self._pages, key=lambda one: len(self._pages[one])))

    def _pages_of(self, hashes: list[bytes]) -> np.ndarray:
        """The cached pages that it takes to go on after these blocks: int32 [m]."""
        index, found = self._kv.index, list[int | None]()
        for table in self._kv.tables:
            needed = hashes[table.first_needed(len(hashes) * self._kv.block_size) :]
            found += map(index.page_of, index.keys(needed, table.index))
        return np.array([page for page in found if page is not None], np.int32)

    def _ending_on(self, key: str, hashes: list[bytes]) -> list[_Grant]:
        grants = self._grants.get(key, {})
        return [grants[block] for block in hashes if block in grants]

    # -- grants that end ----------------------------------------------------------------------------------------------
    def expire(self) -> None:
        """End the grants whose time is over."""
        if (now := self._now()) < self._next_end:
            return
        grants = [grant for of_key in self._grants.values() for grant in of_key.values()]
        self._next_end = min((grant.until for grant in grants if grant.until > now), default=math.inf)
        self.counts["expired"] += sum(self._end(grant) for grant in grants if grant.until <= now)

    def lost(self, pages: np.ndarray) -> None:
        """What these pages, int32 [n], held is gone: given up, or found wrong."""
        if (kept := pages[self._grants_on[pages] > 0]).size:
            early = int(np.count_nonzero(self._until[kept] > self._now()))
            self.counts["given_up"] += early
            self.counts["expired"] += kept.size - early
            self._lives[kept] += 1
            self._clear(kept)

    def clear(self) -> None:
        """Nothing is cached any more, and the evictor knows."""
        self._lives += 1
        self._grants.clear()
        self._pages.clear()
        self._next_end = math.inf
        self._clear(np.flatnonzero(self._grants_on))

    def _displace(self, key: str) -> None:
        weakest = min(self._grants[key].values(), key=lambda grant: (grant.priority, grant.until))
        self.counts["displaced"] += self._end(weakest)

    def _end(self, grant: _Grant) -> int:
        """Returns how many pages nobody retains any more."""
        held = self._pages[grant.key]
        held.subtract(grant.pages.tolist())
        for page in grant.pages.tolist():
            if not held[page]:
                del held[page]
        of_key = self._grants[grant.key]
        del of_key[grant.last]
        if not of_key:
            del self._grants[grant.key], self._pages[grant.key]
        left = grant.pages[self._lives[grant.pages] == grant.lives]
        self._grants_on[left] -= 1
        freed = left[self._grants_on[left] == 0]
        self._clear(freed)
        self._changed(freed)
        return int(freed.size)

    def _clear(self, pages: np.ndarray) -> None:
        self._grants_on[pages] = self._priority[pages] = 0
        self._until[pages] = 0.0
        self._total -= pages.size
        self._shown = None

    def _changed(self, pages: np.ndarray) -> None:
        self._shown = None
        if pages.size:
            self._kv.pool.tell_evictor()  # of these pages, first
            self._evictor.retain(pages, self._priority[pages], self._until[pages])

    # -- for monitors -------------------------------------------------------------------------------------------------
    def of_pages(self) -> np.ndarray:
        """bool [num_pages]: which are retained."""
        self.expire()
        return self._grants_on > 0

    def by_priority(self) -> tuple[tuple[str, int], ...]:
        """Pages by priority, "pinned" the last."""
        self.expire()
        if self._shown is None:
            found = zip(*np.unique(self._priority[self._grants_on > 0], return_counts=True), strict=True)
            self._shown = tuple(("pinned" if one == PINNED else str(one), int(count)) for one, count in found)
        return self._shown

    def check_integrity(self, committed: np.ndarray) -> None:
        """Raise AssertionError where grants, pages and bounds contradict each other. committed: bool [num_pages]."""
        on = np.zeros_like(self._grants_on)
        for key, of_key in self._grants.items():
            grants = of_key.values()
            assert self._pages[key] == sum((Counter(grant.pages.tolist()) for grant in grants), Counter())
            assert len(self._pages[key]) <= self.most_of_key, f"{key!r} retains more than it may"
            for grant in grants:
                on[grant.pages[self._lives[grant.pages] == grant.lives]] += 1
        assert (on == self._grants_on).all() and self._grants.keys() == self._pages.keys()
        assert int(np.count_nonzero(on)) == self._total <= self.most, "more is retained than may be"
        assert committed[on > 0].all(), "a page is retained that holds nothing"
        assert not self._until[on == 0].any() and (self._until[on > 0] >= self._next_end).all()
