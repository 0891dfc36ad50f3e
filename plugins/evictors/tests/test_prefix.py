"""The order of `prefix`, against a plain model of it; whole engine cores with it; and its gain on a shared prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.interfaces.context import CoreContext
from engine.types.kv import KVLayout
from engine_evictors.prefix.body import Prefix
from engine_evictors.prefix.card import PrefixEvictor, PrefixOptions

PAGES = 24


def make(**options: float) -> Prefix:
    layout = KVLayout(block_size=1, page_bytes=1, tables=(), groups=())
    return Prefix(
        CoreContext(
            layout=layout, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, num_pages=PAGES,
            options=PrefixOptions(**options),
        )
    )  # fmt: skip


def array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def commit(evictor: Prefix, pages: Sequence[int], parents: Sequence[int]) -> None:
    evictor.on_commit(array(*pages), array(*parents), [bytes([page]) for page in pages])


def commit_chain(evictor: Prefix, pages: Sequence[int]) -> None:
    commit(evictor, pages, [0, *pages[:-1]])


def test_leaves_go_first_from_the_end() -> None:
    evictor = make()
    commit_chain(evictor, [1, 2, 3])
    evictor.on_release(array(1, 2, 3))
    assert evictor.victims(3, 0).tolist() == [3, 2, 1]


def test_a_trunk_outlives_its_branches_whatever_was_released_last() -> None:
    evictor = make()
    commit_chain(evictor, [1, 2])
    commit(evictor, [3, 4], [2, 2])
    evictor.on_release(array(1, 2))
    evictor.on_release(array(3))
    evictor.on_release(array(4))
    assert evictor.victims(4, 0).tolist() == [3, 4, 2, 1]


def test_a_shared_prompt_outlives_younger_pages() -> None:
    evictor = make()
    commit_chain(evictor, [1])
    for branch in (2, 3, 4):  # three sequences go on after page 1
        commit(evictor, [branch], [1])
    evictor.on_release(array(1, 2, 3, 4))
    commit_chain(evictor, [5, 6])
    evictor.on_release(array(5, 6))
    assert evictor.victims(6, 0).tolist() == [4, 3, 2, 6, 5, 1]


def test_a_conversation_that_finds_its_own_pages_is_not_shared() -> None:
    evictor = make()
    commit_chain(evictor, [1])
    evictor.on_release(array(1))
    commit_chain(evictor, [2])
    for _ in range(10):
        evictor.on_touch(array(1))
        evictor.on_release(array(1))
    evictor.on_touch(array(2))
    evictor.on_release(array(2))
    assert evictor.victims(2, 0).tolist() == [1, 2]


def test_a_branch_counts_after_the_first_one_was_given_up() -> None:
    evictor = make()
    commit_chain(evictor, [1, 2])
    evictor.on_release(array(1, 2))
    assert evictor.victims(1, 0).tolist() == [2]
    evictor.on_touch(array(1))
    commit(evictor, [3], [1])
    evictor.on_release(array(1, 3))
    commit_chain(evictor, [4])
    evictor.on_release(array(4))
    assert evictor.victims(3, 0).tolist() == [3, 4, 1]


def test_what_was_popular_once_goes_some_day() -> None:
    evictor = make(share_limit=3)
    commit_chain(evictor, [1])
    for page in range(2, 12):
        commit(evictor, [page], [1])
    evictor.on_release(array(*range(1, 12)))
    assert 1 not in evictor.victims(10, 0)
    for turn in range(1000):
        page = 2 + turn % 2
        commit_chain(evictor, [page])
        evictor.on_release(array(page))
        if 1 in evictor.victims(1, 0):
            assert turn > PAGES
            return
    pytest.fail("the page stayed for ever")


def test_weight_0_is_age_alone() -> None:
    evictor = make(share_weight=0.0)
    commit_chain(evictor, [1])
    commit(evictor, [2, 3], [1, 1])
    evictor.on_release(array(1, 2, 3))
    evictor.victims(2, 0)
    commit_chain(evictor, [4])
    evictor.on_release(array(4))
    assert evictor.victims(2, 0).tolist() == [1, 4]


def test_options_are_checked() -> None:
    assert PrefixEvictor.Options is PrefixOptions
    with pytest.raises(ValueError, match="share_weight"):
        PrefixOptions(share_weight=-1)


class Machine(RuleBasedStateMachine):
    """The contract: only candidates are given, each once, never a page with a cached child that could go instead."""

    def __init__(self) -> None:
        super().__init__()
        self.evictor = make()
        self.parent: dict[int, int] = {}
        self.held: set[int] = set()
        self.candidates: set[int] = set()

    @property
    def free(self) -> list[int]:
        return [page for page in range(1, PAGES) if page not in self.parent]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(self.free), min_size=1, max_size=5, unique=True))
        above = data.draw(st.sampled_from([0, *self.parent]))
        commit(self.evictor, chain, [above, *chain[:-1]])
        for page, parent in zip(chain, [above, *chain[:-1]], strict=True):
            self.parent[page] = parent
            self.held.add(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        self.evictor.on_release(array(*pages))
        self.held -= set(pages)
        self.candidates |= set(pages)

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.parent)), min_size=1, unique=True))
        self.evictor.on_touch(array(*pages))
        self.held |= set(pages)
        self.candidates -= set(pages)

    @precondition(lambda self: self.candidates)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(self.candidates)))
        given = self.evictor.victims(n, 0).tolist()
        assert len(given) == len(set(given)) == n
        for page in given:
            assert page in self.candidates
            with_children = {parent for child, parent in self.parent.items() if child in self.parent}
            if page in with_children:
                assert not self.candidates - with_children, f"page {page} went before a leaf"
            self.candidates.discard(page)
            del self.parent[page]
            for child, parent in self.parent.items():
                if parent == page:
                    self.parent[child] = 0

    @rule()
    def reset(self) -> None:
        self.evictor.reset()
        self.parent.clear()
        self.held.clear()
        self.candidates.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.evictor) == len(self.candidates)
        self.evictor.check_integrity()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
