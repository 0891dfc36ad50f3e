"""The suite of point `evictor`: any sequence of calls, as hypothesis finds them, against the interface's promises."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.interfaces.evictor import Evictor
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.core_contexts import core_context
from engine_sdk.conformance.timing import median_seconds

PAGES = 24
"""Of the pools that hypothesis fills; the null page is one of them."""


class EvictorConformance(Conformance):
    """Only candidates are given up, each once, as many as are asked for, and in an order that is one."""

    point = "evictor"
    protocol = "Evictor"

    @classmethod
    def needs(cls) -> Sequence[None]:
        return [None]

    @classmethod
    def make(cls, num_pages: int = PAGES) -> Evictor:
        """A body for a pool of this many pages."""
        return cls.body()(core_context(cls.subject(), num_pages))  # type: ignore[no-any-return]

    def test_nothing_at_first(self) -> None:
        """No candidates, and no victims however many are asked for."""
        evictor = self.make()
        assert len(evictor) == 0 and _given(evictor, 3) == []
        evictor.check_integrity()

    def test_what_is_held_stays(self) -> None:
        """Committed pages are no candidates until they are released, nor once they are touched."""
        evictor = self.make()
        _commit(evictor, [1, 2, 3])
        assert len(evictor) == 0 and _given(evictor, 3) == []
        evictor.on_release(_array(1, 2, 3))
        evictor.on_touch(_array(2, 1))
        assert len(evictor) == 1 and _given(evictor, 1) == [3]
        evictor.on_touch(_array(1))  # it is held already
        assert len(evictor) == 0

    @pytest.mark.parametrize("length", [2, 5, 20])
    def test_the_end_of_a_sequence_goes_first(self, length: int) -> None:
        """Of pages that are released together the last goes first: a page is of no use without those before it."""
        evictor, pages = self.make(), list(range(1, length + 1))
        _commit(evictor, pages)
        evictor.on_release(_array(*pages))
        assert _given(evictor, length) == pages[::-1]

    def test_victims_are_forgotten(self) -> None:
        """A page that was given up holds other content when it comes back: what was known of it counts no more."""
        evictor = self.make()
        for _ in range(50):
            _commit(evictor, [1, 2, 3])
            evictor.on_release(_array(1, 2, 3))
            assert sorted(_given(evictor, 3)) == [1, 2, 3]
            assert len(evictor) == 0 and _given(evictor, 1) == []
            evictor.check_integrity()

    def test_reset_forgets(self) -> None:
        """Candidates and held pages alike; the same pages may be committed again."""
        evictor = self.make()
        _commit(evictor, [1, 2, 3, 4])
        evictor.on_release(_array(1, 2))
        evictor.reset()
        assert len(evictor) == 0 and _given(evictor, 4) == []
        _commit(evictor, [2, 3])
        evictor.on_release(_array(2, 3))
        assert _given(evictor, 2) == [3, 2]
        evictor.check_integrity()

    def test_one_by_one_or_all_at_once(self) -> None:
        """The order does not depend on how many are asked for."""
        random = np.random.default_rng(0)
        for _ in range(20):
            evictors = [self.make(200), self.make(200), self.make(200)]
            held: list[int] = []
            free = list(range(1, 200))
            for _ in range(30):
                chain = [free.pop(int(random.integers(len(free)))) for _ in range(int(random.integers(1, 5)))]
                above = int(random.choice([0, *held])) if held else 0
                held += chain
                going = [page for page in held if random.random() < 0.3]
                held = [page for page in held if page not in going]
                for evictor in evictors:
                    _commit(evictor, chain, above)
                    if going:
                        evictor.on_release(_array(*going))
            n = len(evictors[0])
            whole = _given(evictors[0], n)
            assert [page for _ in range(n) for page in _given(evictors[1], 1)] == whole
            assert _given(evictors[2], n // 2) + _given(evictors[2], n - n // 2) == whole

    def test_many_turns_of_a_large_pool(self) -> None:
        """Thousands of pages, hundreds of times: what is kept of past turns neither grows into the way nor runs out."""
        evictor, random = self.make(2001), np.random.default_rng(1)
        _commit(evictor, list(range(1, 2001)))
        candidates: set[int] = set()
        pages = np.arange(1, 2001)
        for turn in range(300):
            some = random.choice(pages, 200, replace=False).astype(np.int32)
            if turn % 3:
                fresh = np.array([page for page in some.tolist() if page not in candidates], np.int32)
                evictor.on_release(fresh)
                candidates |= set(fresh.tolist())
            else:
                evictor.on_touch(some)
                candidates -= set(some.tolist())
            if turn % 10 == 9:
                given = _given(evictor, len(candidates) // 2)
                assert len(set(given)) == len(given) and set(given) <= candidates
                candidates -= set(given)
                _commit(evictor, given)
            assert len(evictor) == len(candidates)
        evictor.check_integrity()

    def test_thousands_of_calls(self) -> None:
        """Few pages for a long time: each is touched thousands of times, by requests that hold it already, too."""
        evictor, random = self.make(8), np.random.default_rng(2)
        free, held, candidates = set(range(1, 8)), set[int](), set[int]()
        for _ in range(8000):
            what, some = random.integers(8), set((np.flatnonzero(random.random(7) < 0.5) + 1).tolist())
            if what == 0 and (chain := sorted(some & free)):
                _commit(evictor, chain)
                free, held = free - some, held | {*chain}
            elif what == 1:
                given = _given(evictor, int(random.integers(1, 4)))
                assert set(given) <= candidates, f"pages that are no candidates: {set(given) - candidates}"
                free, candidates = free | {*given}, candidates - {*given}
            elif what < 5 and (going := sorted(some & held)):
                evictor.on_release(_array(*going))
                held, candidates = held - some, candidates | {*going}
            elif found := sorted(some & (held | candidates)):
                evictor.on_touch(_array(*found))
                held, candidates = held | {*found}, candidates - some
            assert len(evictor) == len(candidates)
        evictor.check_integrity()

    def test_what_comes_back(self) -> None:
        """Content that was given up is committed again, on any page: it is held until it is released."""
        evictor = self.make()
        for turn in range(100):
            first = 1 + turn % 5
            chain = [first, first + 1, first + 2]
            _commit(evictor, chain, contents=[7, 8, 9 + turn % 2])
            assert len(evictor) == 0 and _given(evictor, 3) == []
            evictor.on_release(_array(*chain))
            assert sorted(_given(evictor, 3)) == chain
            evictor.check_integrity()

    def test_memory_is_bounded(self) -> None:
        """By the pool, not by all content that ever was."""
        evictor = self.make(8)

        def turns(start: int, stop: int) -> int:
            for content in range(start, stop):
                _commit(evictor, [1 + content % 7], contents=[content])
                evictor.on_release(_array(1 + content % 7))
                _given(evictor, 1)
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = turns(0, 1000)
            left = turns(1000, 6000) - before
        finally:
            tracemalloc.stop()
        assert left < 100_000, f"{left} bytes more are kept after 5,000 pages, in a pool of 7"

    def test_any_sequence_of_calls(self) -> None:
        """Commits, touches, releases, evictions and resets in any order."""
        make = self.make

        class Machine(_Calls):
            def make(self) -> Evictor:
                return make()

        run_state_machine_as_test(Machine, settings=self.hypothesis_settings(60, stateful_step_count=40))

    @classmethod
    def figure(cls) -> str | None:
        """What a page costs on its way round."""
        evictor, pages = cls.make(10_001), np.arange(1, 10_001, dtype=np.int32)
        parents = np.append(np.int32(0), pages[:-1])
        hashes = [page.to_bytes(32, "little") for page in pages.tolist()]

        def turn() -> None:
            evictor.on_commit(pages, parents, hashes)
            evictor.on_release(pages)
            evictor.on_touch(pages[::2])
            evictor.on_release(pages[::2])
            evictor.victims(len(pages), 0)

        return f"commit, release, touch and eviction of a page: {median_seconds(turn) / len(pages) * 1e9:,.0f} ns"


class _Calls(RuleBasedStateMachine):
    """The pool's side: which pages are free, held, candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.evictor = self.make()
        self.held: set[int] = set()
        self.candidates: set[int] = set()
        self.content: dict[int, int] = {}

    def make(self) -> Evictor:
        """A new body."""
        raise NotImplementedError

    @property
    def free(self) -> list[int]:
        """Pages without cached content."""
        return [page for page in range(1, PAGES) if page not in self.held | self.candidates]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A sequence, behind any page that is there, or behind none."""
        chain = data.draw(st.lists(st.sampled_from(self.free), min_size=1, max_size=5, unique=True))
        above = data.draw(st.sampled_from([0, *sorted(self.held)]))
        there = {self.content[page] for page in self.held | self.candidates}
        # Some have been here before, on this page or another.
        contents = data.draw(st.permutations([content for content in range(2 * PAGES) if content not in there]))
        self.content.update(zip(chain, contents, strict=False))
        _commit(self.evictor, chain, above, [self.content[page] for page in chain])
        self.held |= set(chain)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Some that are held."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        self.evictor.on_release(_array(*pages))
        self.held -= set(pages)
        self.candidates |= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """Some that are held lose their content: the evictor is not told, and they may be committed anew."""
        self.held -= set(data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True)))

    @precondition(lambda self: self.held | self.candidates)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """Any that are cached."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held | self.candidates)), min_size=1, unique=True))
        self.evictor.on_touch(_array(*pages))
        self.held |= set(pages)
        self.candidates -= set(pages)

    @precondition(lambda self: self.candidates)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """As many as there are, at most."""
        n = data.draw(st.integers(1, len(self.candidates)))
        given = _given(self.evictor, n)
        assert len(given) == n, f"{len(given)} victims, of {n} that were asked for"
        assert len(set(given)) == n, f"a page was given up twice: {given}"
        assert set(given) <= self.candidates, f"pages that are no candidates: {set(given) - self.candidates}"
        self.candidates -= set(given)

    @rule()
    def reset(self) -> None:
        """Everything is forgotten."""
        self.evictor.reset()
        self.held.clear()
        self.candidates.clear()

    @invariant()
    def counts_agree(self) -> None:
        """As many candidates as there are."""
        assert len(self.evictor) == len(self.candidates)
        self.evictor.check_integrity()


def _array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def _commit(evictor: Evictor, chain: list[int], above: int = 0, contents: Sequence[int] = ()) -> None:
    """A sequence behind a page; contents: what each page holds, as a number. None: always the same of a page."""
    hashes = [content.to_bytes(32, "little") for content in contents or chain]
    evictor.on_commit(_array(*chain), _array(above, *chain[:-1]), hashes)


def _given(evictor: Evictor, n: int) -> list[int]:
    victims: Any = evictor.victims(n, 0)
    assert isinstance(victims, np.ndarray) and victims.dtype == np.int32, "victims are no int32 array"
    pages: list[int] = victims.tolist()
    return pages
