"""The suite of point `evictor`: any sequence of calls, as hypothesis finds them, against the interface's promises."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.interfaces.context import Clock
from engine.interfaces.evictor import Evictor, RetainingEvictor, Reuse, ReusingEvictor
from engine_sdk.conformance.base import Conformance, NotServed, not_served
from engine_sdk.conformance.core_contexts import core_context, one_layer
from engine_sdk.conformance.timing import median_seconds

BLOCK_SIZE = one_layer(256).block_size
"""Of the contexts that bodies are built with."""
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
    def make(cls, num_pages: int = PAGES, clock: Clock | None = None) -> Evictor:
        """A body for a pool of this many pages."""
        return cls.body()(core_context(cls.subject(), num_pages, clock=clock))  # type: ignore[no-any-return]

    @classmethod
    def make_retaining(cls) -> tuple[RetainingEvictor, HandClock]:
        """A body that retains, and its clock."""
        clock = HandClock()
        evictor = cls.make(clock=clock)
        if getattr(evictor, "retain", None) is None:
            not_served("it has no retain")
        return cast(RetainingEvictor, evictor), clock

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

        class Machine(_EvictorCalls):
            def make(self) -> Evictor:
                return make()

        run_state_machine_as_test(Machine, settings=self.hypothesis_settings(60, stateful_step_count=40))

    separator: bytes = b" # # "
    """What stands between two chunks, for a driver that reuses them; tokens are bytes."""

    @classmethod
    def reusing(cls) -> ReusingEvictor:
        """A body that finds what is no prefix; the test is skipped where it does not."""
        if not cls.subject().card.reuses:  # type: ignore[attr-defined]
            raise NotServed("it finds prefixes alone")
        return cls.make(2001)  # type: ignore[return-value]

    def test_chunks_in_another_order(self) -> None:
        """What is reused has the same tokens, in the blocks that hold them, and stands once, behind the prefix; and
        something is found."""
        evictor, seen, random = self.reusing(), _Seen(), np.random.default_rng(3)
        chunks = [random.integers(97, 123, int(n)).astype(np.uint8).tobytes() for n in random.integers(20, 90, 12)]
        found = 0
        for turn in range(60):
            parts = [chunks[i] for i in random.permutation(len(chunks))[: int(random.integers(1, 6))]]
            tokens = np.frombuffer(self.separator.join([*parts, b"and so on"]), np.uint8).astype(np.int32)
            root = (b"one", b"another")[turn % 2]
            start = int(random.integers(0, len(tokens))) if turn % 3 == 2 else 0
            found += seen.check(evictor.reuse(root, tokens, start), root, tokens, start)
            if turn % 4 < 2:
                evictor.remember(root, *seen.sequence(root, tokens))
        assert found > 1000, f"{found} tokens were reused"

    def test_chunks_of_others_are_not_found(self) -> None:
        """Another root: another tenant's, another adapter's."""
        evictor, seen = self.reusing(), _Seen()
        text = self.separator.join([b"a" * 40, b"b" * 50, b"c" * 60, b"end of it all"])
        tokens = np.frombuffer(text, np.uint8).astype(np.int32)
        evictor.remember(b"one", *seen.sequence(b"one", tokens))
        assert not evictor.reuse(b"another", tokens, 0) and evictor.reuse(b"one", tokens, 0)

    def test_reset_forgets_chunks(self) -> None:
        """With the cache they are gone."""
        evictor, seen = self.reusing(), _Seen()
        tokens = np.frombuffer(self.separator.join([b"a" * 40, b"b" * 50, b"end"]), np.uint8).astype(np.int32)
        evictor.remember(b"", *seen.sequence(b"", tokens))
        evictor.reset()
        assert not evictor.reuse(b"", tokens, 0)

    def test_memory_of_chunks_is_bounded(self) -> None:
        """By the pool: of many that were remembered few are kept."""
        evictor, seen = self.reusing(), _Seen()
        tracemalloc.start()
        try:
            for turn in range(4000):
                tokens = np.frombuffer(b"%040d" % turn + self.separator + b"%020d" % turn, np.uint8).astype(np.int32)
                evictor.remember(b"", *seen.sequence(b"", tokens))
                if turn == 2001:
                    before = tracemalloc.get_traced_memory()[0]
                seen.blocks.clear()
            left = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert left < 300_000, f"{left} bytes more are kept after 2,000 chunks more, in a pool of 2,000 pages"

    def test_retained_pages_go_last(self) -> None:
        """After all others, by priority, of one priority in the evictor's own order; all where all are wanted."""
        evictor, _ = self.make_retaining()
        _commit(evictor, [1, 2, 3, 4])
        _commit(evictor, [5, 6])
        _commit(evictor, [7, 8])
        _retain(evictor, [1, 2], 0, 50.0)  # some are held yet
        evictor.on_release(_array(1, 2, 3, 4))
        evictor.on_release(_array(5, 6))
        _retain(evictor, [5, 6], 7, 10.0)
        evictor.on_release(_array(7, 8))
        assert len(evictor) == 8 and _given(evictor, 2) == [4, 3] and _given(evictor, 2) == [8, 7]
        assert len(evictor) == 4 and _given(evictor, 3) == [2, 1, 6] and _given(evictor, 3) == [5]
        evictor.check_integrity()

    def test_retention_ends(self) -> None:
        """When its time is over, whether the pages have been passed over or not; when it is taken back."""
        evictor, clock = self.make_retaining()
        for first in (1, 4, 7):
            _commit(evictor, [first, first + 1])
            evictor.on_release(_array(first, first + 1))
        _retain(evictor, [1, 2], 3, 10.0)
        _retain(evictor, [4, 5], 0, math.inf)
        assert _given(evictor, 2) == [8, 7]  # the others have been passed over
        _commit(evictor, [7])
        evictor.on_release(_array(7))
        clock.now = 9.5
        assert _given(evictor, 1) == [7]
        _commit(evictor, [7])
        evictor.on_release(_array(7))
        clock.now = 10.0
        assert sorted(_given(evictor, 3)) == [1, 2, 7]
        clock.now = 1e12
        _commit(evictor, [1, 2])
        evictor.on_release(_array(1, 2))
        assert _given(evictor, 1) == [2]
        _retain(evictor, [1], 5, 2e12)
        _retain(evictor, [4, 5], 9, math.inf)
        _retain(evictor, [4, 5], 0, 0.0)
        assert _given(evictor, 3) == [5, 4, 1]
        evictor.check_integrity()

    def test_what_is_retained_is_found_and_held(self) -> None:
        """A retained page that was passed over is no candidate while a request holds it, and is retained afterwards."""
        evictor, _ = self.make_retaining()
        _commit(evictor, [1, 2])
        _commit(evictor, [3])
        evictor.on_release(_array(1, 2))
        evictor.on_release(_array(3))
        _retain(evictor, [1, 2], 1, 10.0)
        assert _given(evictor, 1) == [3] and len(evictor) == 2
        evictor.on_touch(_array(1, 2))
        assert len(evictor) == 0 and _given(evictor, 2) == []
        evictor.on_release(_array(1, 2))
        _commit(evictor, [3])
        evictor.on_release(_array(3))
        assert len(evictor) == 3 and _given(evictor, 3) == [3, 2, 1]

    def test_retention_ends_with_the_content(self) -> None:
        """A page that was given up, or all that were there before a reset, are retained no more with other content."""
        evictor, _ = self.make_retaining()
        for again in (lambda: _given(evictor, 1), evictor.reset):
            _commit(evictor, [1])
            _retain(evictor, [1], 9, math.inf)
            evictor.on_release(_array(1))
            again()
            _commit(evictor, [1], contents=[5])
            _commit(evictor, [2])
            evictor.on_release(_array(1))
            evictor.on_release(_array(2))
            assert _given(evictor, 2) == [1, 2]

    def test_any_retention(self) -> None:
        """Any sequence of calls, retention among them, while time passes."""
        self.make_retaining()
        make = self.make_retaining

        class Machine(_RetainingCalls):
            def make(self) -> Evictor:
                evictor, self.clock = make()
                return evictor

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


class _Seen:
    """Which block is called what."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}  # root, and the tokens from the sequence's start

    def sequence(self, root: bytes, tokens: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
        """Its whole blocks, and their hashes."""
        text, size = tokens.astype(np.uint8).tobytes(), BLOCK_SIZE
        ends = range(size, len(text) + 1, size)
        hashes = [blake2b(root + b":" + text[:end], digest_size=16).digest() for end in ends]
        self.blocks.update((hashed, (root, text[:end])) for hashed, end in zip(hashes, ends, strict=True))
        return tokens[: len(hashes) * size], hashes

    def check(self, spans: Sequence[Reuse], root: bytes, tokens: np.ndarray, start: int) -> int:
        """How many tokens the spans have, which are what they say."""
        text, size, known = tokens.astype(np.uint8).tobytes(), BLOCK_SIZE, start
        for span in spans:
            assert known <= span.start < span.end <= len(text), f"{span} behind {known}"
            known, last = span.end, span.position + span.end - span.start - 1
            assert len(span.hashes) == last // size - span.position // size + 1, f"{span} names other blocks"
            for block, hashed in enumerate(span.hashes, span.position // size):
                of, whole = self.blocks[hashed]
                assert of == root and len(whole) == (block + 1) * size, f"block {block} of {span} is another one"
                for position in range(max(block * size, span.position), min((block + 1) * size, last + 1)):
                    place = span.start + position - span.position
                    assert whole[position] == text[place], f"token {place} of {span} is not what was remembered"
        return sum(span.end - span.start for span in spans)


class _EvictorCalls(RuleBasedStateMachine):
    """The pool's side: which pages are free, held, candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.evictor = self.make()
        self.held: set[int] = set()
        self.candidates: set[int] = set()
        self.content: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        """Of the pages that the evictor takes for cached: those that lost their content unheard are among them."""

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
        self.cut(chain)
        self.parents.update(zip(chain, [above, *chain[:-1]], strict=True))
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
        self.gave(given)

    def gave(self, pages: list[int]) -> None:
        """These were given up, in this order."""
        self.cut(pages)

    def cut(self, pages: Sequence[int]) -> None:
        """Nothing goes on from what these pages held."""
        for page in pages:
            self.parents.pop(page, None)
        self.parents.update({page: 0 for page, parent in self.parents.items() if parent in pages})

    @rule()
    def reset(self) -> None:
        """Everything is forgotten."""
        self.evictor.reset()
        self.held.clear()
        self.candidates.clear()
        self.cut(list(self.parents))

    @invariant()
    def counts_agree(self) -> None:
        """As many candidates as there are."""
        assert len(self.evictor) == len(self.candidates)
        self.evictor.check_integrity()


class HandClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        self.now += seconds


class _RetainingCalls(_EvictorCalls):
    """The same with retention: what is given up is of the lowest class that there is, but for pages from which cached
    pages go on."""

    clock: HandClock

    def __init__(self) -> None:
        super().__init__()
        self.wishes: dict[int, tuple[int, float]] = {}

    def wish(self, page: int) -> tuple[int, float]:
        """What holds of a page now: its priority, and until when; (-1, 0): it is not retained."""
        priority, until = self.wishes.get(page, (-1, 0.0))
        return (priority, until) if until > self.clock.now else (-1, 0.0)

    @precondition(lambda self: self.held | self.candidates)
    @rule(
        data=st.data(),
        priority=st.integers(0, 3),
        seconds=st.sampled_from([1.0, 3.0, math.inf]),
    )
    def retain(self, data: st.DataObject, priority: int, seconds: float) -> None:
        """A page and those before it."""
        page = data.draw(st.sampled_from(sorted(self.held | self.candidates)))
        chain = []
        while page in self.held | self.candidates:
            chain.append(page)
            page = self.parents[page]
        for page in chain:
            before, until = self.wish(page)
            self.wishes[page] = max(before, priority), max(until, self.clock.now + seconds)
        told = [self.wishes[page] for page in chain]
        self.evictor.retain(  # type: ignore[attr-defined]
            _array(*chain),
            np.array([priority for priority, _ in told], np.int32),
            np.array([until for _, until in told]),
        )

    @precondition(lambda self: self.held | self.candidates)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """A page and those after it are retained no more."""
        cached = self.held | self.candidates
        pages = {data.draw(st.sampled_from(sorted(cached)))}
        while more := {page for page, parent in self.parents.items() if parent in pages} - pages:
            pages |= more
        pages &= cached
        for page in pages:
            self.wishes.pop(page, None)
        _retain(cast(RetainingEvictor, self.evictor), sorted(pages), 0, 0.0)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        """Some ends."""
        self.clock.sleep(seconds)

    def gave(self, pages: list[int]) -> None:
        """See the class."""
        for i, page in enumerate(pages):
            bare = (self.candidates | set(pages[i:])) - set(self.parents.values())
            lower = [other for other in bare if self.wish(other)[0] < self.wish(page)[0]]
            assert not lower, f"page {page}, of priority {self.wish(page)[0]}, went before {lower}"
            self.cut([page])

    def cut(self, pages: Sequence[int]) -> None:
        """Nor are they retained."""
        super().cut(pages)
        for page in pages:
            self.wishes.pop(page, None)


def _array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def _commit(evictor: Evictor, chain: list[int], above: int = 0, contents: Sequence[int] = ()) -> None:
    """A sequence behind a page; contents: what each page holds, as a number. None: always the same of a page."""
    hashes = [content.to_bytes(32, "little") for content in contents or chain]
    evictor.on_commit(_array(*chain), _array(above, *chain[:-1]), hashes)


def _retain(evictor: RetainingEvictor, pages: list[int], priority: int, until: float) -> None:
    evictor.retain(_array(*pages), np.full(len(pages), priority, np.int32), np.full(len(pages), until))


def _given(evictor: Evictor, n: int) -> list[int]:
    victims: Any = evictor.victims(n, 0)
    assert isinstance(victims, np.ndarray) and victims.dtype == np.int32, "victims are no int32 array"
    pages: list[int] = victims.tolist()
    return pages
