"""States of pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from evictors import array, lru

from engine.kv.index import PrefixIndex
from engine.kv.pool import PagePool
from engine.types.errors import ContractError


class Recorder:
    """An evictor that writes down its calls, around the builtin one."""

    def __init__(self, num_pages: int) -> None:
        self.inner = lru(num_pages)
        self.calls: list[tuple[str, list[int]]] = []
        self.hashes: list[list[bytes]] = []

    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        self.calls.append(("commit", list(zip(pages.tolist(), parents.tolist(), strict=True))))
        self.hashes.append(list(hashes))
        self.inner.on_commit(pages, parents, hashes)

    def on_touch(self, pages: np.ndarray) -> None:
        self.calls.append(("touch", pages.tolist()))
        self.inner.on_touch(pages)

    def on_release(self, pages: np.ndarray) -> None:
        self.calls.append(("release", pages.tolist()))
        self.inner.on_release(pages)

    def victims(self, n: int, table: int) -> np.ndarray:
        pages = self.inner.victims(n, table)
        self.calls.append(("victims", pages.tolist()))
        return pages

    def __len__(self) -> int:
        return len(self.inner)

    def reset(self) -> None:
        self.inner.reset()

    def check_integrity(self) -> None:
        self.inner.check_integrity()


def make_pool(num_pages: int = 6) -> tuple[PagePool, PrefixIndex, Recorder]:
    index, evictor = PrefixIndex(num_pages, 1), Recorder(num_pages)
    return PagePool(num_pages, index, evictor), index, evictor


def commit(pool: PagePool, index: PrefixIndex, *pages: int) -> None:
    parent = 0
    for page in pages:
        index.add([bytes([page])], [page])
        pool.commit(np.array([page]), np.array([parent]))
        parent = page


def check(pool: PagePool, held: dict[int, int]) -> None:
    refs = np.zeros(pool.num_pages, np.int32)
    for page, count in held.items():
        refs[page] = count
    pool.check_integrity(refs)


def test_the_null_page_is_never_given_out() -> None:
    pool, _, _ = make_pool()
    (pages,) = pool.take([5])
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5] and pool.num_available == 0
    check(pool, dict.fromkeys(range(1, 6), 1))
    pool.release(pages, 0)
    assert pool.num_available == 5
    check(pool, {})


def test_a_released_page_waits_for_the_last_step_that_names_it() -> None:
    pool, _, _ = make_pool()
    (pages,) = pool.take([3])
    pool.release(pages, np.array([0, 1, 2]))
    assert (pool.num_deferred_free, pool.num_available) == (2, 3)
    check(pool, {})
    pool.step_done(1)
    assert (pool.num_deferred_free, pool.num_available) == (1, 4)
    pool.step_done(2)
    assert (pool.num_deferred_free, pool.num_available) == (0, 5)
    check(pool, {})


def test_a_shared_page_waits_for_the_later_of_its_holders() -> None:
    pool, index, _ = make_pool()
    (pages,) = pool.take([1])
    commit(pool, index, *pages.tolist())
    pool.hold(pages)
    pool.release(pages, 7)  # the holder of step 7 goes first
    pool.release(pages, 3)
    pool.step_done(3)
    assert pool.num_deferred_free == 1
    pool.step_done(7)
    assert (pool.num_deferred_free, pool.num_evictable) == (0, 1)


def test_a_hit_takes_a_pending_page_back() -> None:
    pool, index, evictor = make_pool()
    (pages,) = pool.take([2])
    commit(pool, index, *pages.tolist())
    pool.release(pages, 4)
    pool.hold(pages[:1])
    check(pool, {int(pages[0]): 1})
    pool.step_done(4)
    assert pool.num_evictable == 1
    check(pool, {int(pages[0]): 1})
    pool.release(pages[:1], 4)
    pool.take([0])
    assert [name for name, _ in evictor.calls] == ["commit", "touch", "release"]


def test_a_page_released_twice_in_one_array_is_let_go_once() -> None:
    pool, index, _ = make_pool()
    (pages,) = pool.take([1])
    commit(pool, index, *pages.tolist())
    pool.hold(pages)
    pool.release(np.repeat(pages, 2), 0)
    assert pool.num_evictable == 1
    check(pool, {})


def test_the_evictor_hears_once_a_step_in_order() -> None:
    pool, index, evictor = make_pool()
    (pages,) = pool.take([4])
    a, b, c = pages[:3].tolist()
    commit(pool, index, a, b, c)
    pool.release(pages, 0)
    pool.take([0])
    assert evictor.calls == [("commit", [(a, 0), (b, a), (c, b)]), ("release", [a, b, c])]
    evictor.calls.clear()
    pool.hold(array(a))
    pool.hold(array(b))
    pool.release(array(b), 0)  # touched and released again within a step
    check(pool, {a: 1})
    (taken,) = pool.take([4])
    assert evictor.calls == [("touch", [a, b]), ("release", [b]), ("victims", [c, b])]
    assert sorted(taken.tolist()) == sorted({1, 2, 3, 4, 5} - {a})
    assert index.page_of(bytes([b])) is None and index.page_of(bytes([a])) == a
    check(pool, dict.fromkeys([1, 2, 3, 4, 5], 1))


@pytest.mark.parametrize(
    ("given", "found"),
    [([1], "not evictable"), ([0, 2], "Recorder gave 2 pages"), ([], "Recorder gave 0 pages")],
)
def test_an_evictor_that_gives_others_than_evictable_pages_is_found_out(given: list[int], found: str) -> None:
    pool, index, evictor = make_pool()
    (pages,) = pool.take([5])
    commit(pool, index, *pages.tolist())
    pool.release(pages[[0, 2]], 0)
    evictor.inner.victims = lambda n, group: pages[given]  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=found):
        pool.take([1])


def test_an_evictor_that_gives_a_page_to_two_groups_is_found_out() -> None:
    pool, index, evictor = make_pool()
    (pages,) = pool.take([5])
    commit(pool, index, *pages.tolist())
    pool.release(pages[[0, 2]], 0)
    evictor.inner.victims = lambda n, group: pages[:1]  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="one twice"):
        pool.take([1, 1])


def test_the_map_of_pages():
    pool, index, _ = make_pool(8)
    [pages] = pool.take([4])
    commit(pool, index, *pages[:3].tolist())
    pool.hold(pages[:1])
    pool.release(pages[2:3], 0)
    pool.refs[pages[1]] = 300
    told = pool.page_map()
    holders, cached = (np.frombuffer(part, np.uint8) for part in (told.holders, told.cached))
    expected = np.zeros(7, np.uint8)
    expected[pages - 1] = [2, 255, 0, 1]
    assert holders.tolist() == expected.tolist()
    assert np.flatnonzero(cached).tolist() == sorted((pages[:3] - 1).tolist()) and set(cached) == {0, 1}
    pool.refs[pages[1]] = 1
    assert told.holders[pages[1] - 1] == 255, "it is a copy"


def test_the_evictor_learns_the_hash_of_what_comes_back() -> None:
    """Under which the index names it, whichever page holds it; the ghost lists of 2Q and ARC go by that."""
    pool, index, evictor = make_pool(3)
    for content in (b"a", b"b", b"c", b"a"):
        (pages,) = pool.take([1])
        index.add([content], pages.tolist())
        pool.commit(pages, np.zeros(1, np.int32))
        pool.release(pages, 0)
    pool.take([0])
    assert evictor.hashes == [[b"a"], [b"b"], [b"c"], [b"a"]]
    committed = [of_call[0][0] for name, of_call in evictor.calls if name == "commit"]
    assert committed[0] != committed[3] and pool.num_evicted == 2
