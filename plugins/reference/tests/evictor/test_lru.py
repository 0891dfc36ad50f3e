"""The builtin evictor, against an ordered dict."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from evictors import array, lru
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule


def test_released_longest_ago_goes_first_and_a_sequence_from_its_end() -> None:
    evictor = lru(10)
    evictor.on_release(array(1, 2, 3))
    evictor.on_release(array(4, 5))
    assert len(evictor) == 5
    assert evictor.victims(2, 0).tolist() == [3, 2]
    evictor.on_touch(array(5))
    evictor.on_release(array(5))
    assert evictor.victims(9, 0).tolist() == [1, 4, 5]
    assert len(evictor) == 0 and evictor.victims(1, 0).size == 0


def test_reset_forgets() -> None:
    evictor = lru(10)
    evictor.on_release(array(1, 2, 3))
    evictor.reset()
    assert len(evictor) == 0 and evictor.victims(3, 0).size == 0
    evictor.on_release(array(2))
    assert evictor.victims(3, 0).tolist() == [2]


class AgainstOrderedDict(RuleBasedStateMachine):
    """Any calls in any order; the buffer is small enough to be compacted many times."""

    @initialize(num_pages=st.sampled_from([4, 30, 200]))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evictor = lru(num_pages)
        self.model: OrderedDict[int, None] = OrderedDict()

    @rule(seed=st.integers(0, 2**32), share=st.floats(0, 1))
    def release(self, seed: int, share: float) -> None:
        held = np.array(sorted(set(range(1, self.num_pages)) - set(self.model)), np.int32)
        pages = np.random.default_rng(seed).permutation(held)[: int(share * held.size) + 1]
        self.evictor.on_commit(pages, np.zeros_like(pages), [b""] * pages.size)
        if pages.size:
            self.evictor.on_release(pages)
        self.model.update(dict.fromkeys(pages[::-1].tolist()))

    @rule(seed=st.integers(0, 2**32), share=st.floats(0, 1))
    def touch(self, seed: int, share: float) -> None:
        pages = np.random.default_rng(seed).permutation(np.array(list(self.model), np.int32))
        pages = pages[: int(share * pages.size)]
        self.evictor.on_touch(pages)
        for page in pages.tolist():
            del self.model[page]

    @rule(n=st.integers(1, 300))
    def victims(self, n: int) -> None:
        expected = list(self.model)[:n]
        found = self.evictor.victims(n, 0)
        assert found.dtype == np.int32 and found.tolist() == expected
        for page in expected:
            del self.model[page]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "evictor"):
            assert len(self.evictor) == len(self.model)
            self.evictor.check_integrity()


TestAgainstOrderedDict = AgainstOrderedDict.TestCase
TestAgainstOrderedDict.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
