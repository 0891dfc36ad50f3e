"""Both halves of a connector that keeps pages by key, around a store in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import BLOCK, MemoryStore, Request, core_context, pages_of

from engine.interfaces.kv_connector import LATER, Found, Held, Transferred
from engine.types.parallel import Parallel
from engine_connectors.device_access import DeviceAccess
from engine_connectors.pages import page_key
from engine_connectors.store_scheduler import ASK_AGAIN_SECONDS, PATIENCE_SECONDS, WARN_EVERY, StoreScheduler
from engine_connectors.store_worker import StoreWorker
from engine_sdk.conformance.kv_connector.host_pages import HostPages

PAGE_BYTES = 64
of_all_pools = pytest.mark.parametrize("pool", ["tensor", "device", "paged"])


class Hands:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Nothing:
    """A device's stream, or an event in it, where all is done at once."""

    def __init__(self, device: torch.device) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class OnDevice(StoreWorker):
    """The worker half beside a device."""

    def _access_to(self, pool: Any) -> DeviceAccess:
        return DeviceAccess(pool, self._per_batch, self.lend)


@pytest.fixture(autouse=True)
def a_device_that_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", Nothing)
    monkeypatch.setattr(torch, "Event", Nothing)
    monkeypatch.setattr(DeviceAccess, "_pinned", lambda self, pages: torch.empty(pages, PAGE_BYTES, dtype=torch.uint8))


class Engine:
    """A scheduler half, its ranks and their pools of 40 pages, without anything that computes. pool: a tensor in host
    memory, or reached as one of a device is, or a `PagedPool`."""

    def __init__(
        self, *stores: MemoryStore, waits: bool = False, buffer: int = 1 << 20, pool: str = "tensor", **more: Any
    ) -> None:
        context = core_context(None, parallel=Parallel(tp=len(stores)), **more)
        self.core = StoreScheduler(context, stores[0], waits=waits)
        self.pools = [torch.randint(0, 256, (40, PAGE_BYTES), dtype=torch.uint8) for _ in stores]
        kind = OnDevice if pool == "device" else StoreWorker
        self.workers = [kind(store, 2, buffer) for store in stores]
        for worker, rows in zip(self.workers, self.pools, strict=True):
            worker.register(HostPages(rows.numpy()) if pool == "paged" else rows)
        self.steps = 0

    def step(self, *ranks: int) -> Transferred:
        """A plan, and what the ranks (all, where none is named) have told by then."""
        section = self.core.plan_section()
        self.steps += 1
        for worker in self.workers:
            worker.begin(self.steps, section)
            worker.load(self.steps)
            worker.end(self.steps)
        return self.news(*ranks)

    def news(self, *ranks: int) -> Transferred:
        told = [self.workers[rank].news() for rank in ranks or range(len(self.workers))]
        return self.core.take([news for news in told if news is not None])

    def until_loaded(self) -> Transferred:
        """Steps until something is loaded."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            told = self.step()
            if told.loaded:
                return told
            time.sleep(0.002)
        raise AssertionError("nothing is loaded")

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def keep(engine: Engine, request: Request, first_page: int, end: int) -> list[bytes]:
    """A request computes `end` tokens in pages from `first_page` on, which are kept; their content on each rank."""
    blocks = end // BLOCK
    pages = list(range(first_page, first_page + blocks))
    engine.core.computed(request, pages_of(pages), end)
    engine.core.finished(request, pages_of(pages))
    engine.step()
    return [bytes(pool[pages].numpy().tobytes()) for pool in engine.pools]


def content(engine: Engine, pages: list[int]) -> list[bytes]:
    return [bytes(pool[pages].numpy().tobytes()) for pool in engine.pools]


@of_all_pools
def test_pages_come_back_into_another_engine_on_all_ranks(pool: str) -> None:
    stores = [MemoryStore(), MemoryStore()]
    first = Engine(*stores, pool=pool)
    kept = keep(first, Request("a", 22), 3, 22)
    first.close()
    assert [len(store.kept) for store in stores] == [5, 5] and all(store.closed for store in stores)
    second, request = Engine(*stores, pool=pool), Request("b", 22)
    assert second.core.lookup(request, 0) == Found(20, asynchronous=True)
    second.core.allocated(request, pages_of([30, 9, 12, 5, 6, 7]), 0, 20)
    assert not second.step(0).loaded, "one rank has not told"
    told = second.until_loaded()
    assert list(told.loaded) == ["b"] and not told.failed.size
    assert content(second, [30, 9, 12, 5, 6]) == kept
    second.core.computed(request, pages_of([30, 9, 12, 5, 6, 7]), 22)
    assert second.core.plan_section() is None, "what was loaded is not kept again"
    second.close()


def test_only_what_the_pool_does_not_have_is_read() -> None:
    store = MemoryStore()
    first = Engine(store)
    kept = keep(first, Request("a", 17), 1, 16)[0]
    first.close()
    second, request = Engine(store), Request("b", 17)
    assert second.core.lookup(request, 8) == Found(8, asynchronous=True)
    assert second.core.lookup(Request("c", 16), 0) == Found(12, asynchronous=True), "the last token is computed"
    assert second.core.lookup(Request("d", 17), 16) is None
    assert second.core.lookup(Request("e", 40), 0) == Found(16, asynchronous=True)
    assert second.core.lookup(Request("f", 40, salt="other"), 0) is None
    before = content(second, [1, 2])
    second.core.allocated(request, pages_of([1, 2, 3, 4, 5]), 8, 16)
    second.until_loaded()
    assert content(second, [3, 4])[0] == kept[2 * PAGE_BYTES :] and content(second, [1, 2]) == before
    second.close()


@of_all_pools
def test_pages_that_are_gone_fail_alone(pool: str) -> None:
    store = MemoryStore()
    first = Engine(store, pool=pool)
    keep(first, Request("a", 21), 1, 20)
    first.close()
    second, request = Engine(store, pool=pool), Request("b", 21)
    assert second.core.lookup(request, 0) == Found(20, asynchronous=True)
    hashes = request.block_keys(0)
    del store.kept[page_key(b"me", 0, hashes[2])]
    second.core.allocated(request, pages_of([11, 12, 13, 14, 15]), 0, 20)
    told = second.until_loaded()
    assert list(told.loaded) == ["b"] and told.failed.tolist() == [13]
    second.core.computed(request, pages_of([11, 12, 13, 14, 15]), 20)  # the block was computed again
    second.step()
    second.close()
    assert len(store.kept) == 5, "and is kept again"


@of_all_pools
def test_a_store_that_raises_loses_nothing_but_its_pages(pool: str, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    first = Engine(store)
    keep(first, Request("a", 21), 1, 20)
    first.close()
    store.broken = True
    second, request = Engine(store, pool=pool), Request("b", 21)
    second.core.lookup(request, 0)
    second.core.allocated(request, pages_of([11, 12, 13, 14, 15]), 0, 20)
    assert sorted(second.until_loaded().failed.tolist()) == [11, 12, 13, 14, 15]
    second.core.computed(request, pages_of([11, 12, 13, 14, 15]), 20)
    second.step()
    second.close()
    assert "the store is broken" in caplog.text


@of_all_pools
def test_a_step_never_waits_for_a_slow_store(pool: str) -> None:
    """What the buffer has no room for is not kept, and is offered again when it is computed again."""
    store = MemoryStore()
    store.gate.clear()
    engine = Engine(store, buffer=3 * PAGE_BYTES, pool=pool)
    pages = list(range(1, 9))
    engine.core.computed(Request("a", 33), pages_of(pages), 32)
    before = content(engine, pages)[0]
    engine.step()
    engine.pools[0].zero_()  # others compute in these pages
    engine.step()
    store.gate.set()
    engine.close()
    hashes = [page_key(b"me", 0, one) for one in Request("a", 33).block_keys(0)[:3]]
    assert b"".join(store.kept[key].tobytes() for key in hashes) == before[: 3 * PAGE_BYTES] and len(store.kept) == 3
    engine.news()
    engine.core.computed(Request("b", 33), pages_of(pages), 32)
    assert engine.core.plan_section() is not None


@of_all_pools
def test_a_request_that_ends_while_it_loads_is_told_all_the_same(pool: str) -> None:
    """The core lends its pages until then. Its name may come back meanwhile."""
    store = MemoryStore()
    first = Engine(store, pool=pool)
    kept = keep(first, Request("a", 9), 1, 8)[0]
    first.close()
    second, request = Engine(store, pool=pool), Request("b", 9)
    for pages in ([5, 6, 7], [8, 9, 10]):
        store.gate.set()
        second.core.lookup(request, 0)
        store.gate.clear()
        second.core.allocated(request, pages_of(pages), 0, 8)
        second.step()
        second.core.aborted("b")
    store.gate.set()
    told: list[str] = []
    while len(told) < 2:
        told += second.until_loaded().loaded
    assert told == ["b", "b"] and content(second, [5, 6])[0] == content(second, [8, 9])[0] == kept
    second.close()


def test_a_pool_of_pages_is_filled_by_steps_alone() -> None:
    """What threads have read is written, and told, by the next step; nobody else touches the pool."""
    stores = [MemoryStore(), MemoryStore()]
    first = Engine(*stores)
    kept = keep(first, Request("a", 9), 1, 8)
    first.close()
    second, request = Engine(*stores, pool="paged"), Request("b", 9)
    second.core.lookup(request, 0)
    second.core.allocated(request, pages_of([5, 6, 7]), 0, 8)
    before = content(second, [5, 6])
    assert not second.step().loaded
    for worker in second.workers:  # its threads end when they have read
        worker.close()
    assert not second.news().loaded and content(second, [5, 6]) == before
    told = second.step()
    assert list(told.loaded) == ["b"] and not told.failed.size and content(second, [5, 6]) == kept
    second.core.close()


def test_a_stage_that_caches_nothing_has_a_small_buffer() -> None:
    worker = StoreWorker(MemoryStore(), 1, 256 << 20)
    worker.register(torch.zeros(30, 0, dtype=torch.uint8))
    assert len(worker._free) <= 1 << 20
    worker.close()


def test_a_directory_that_takes_time_is_asked_by_a_thread() -> None:
    store = MemoryStore()
    first = Engine(store)
    keep(first, Request("a", 21), 1, 20)
    first.close()
    store.gate.clear()
    engine, request = Engine(store, waits=True), Request("b", 21)
    assert engine.core.lookup(request, 0) == engine.core.lookup(request, 0) == LATER
    store.gate.set()
    until = time.monotonic() + 20
    while (found := engine.core.lookup(request, 0)) == LATER:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert found == Found(20, asynchronous=True)
    engine.close()


def test_what_is_known_is_changed_by_the_cores_thread_alone() -> None:
    class OfOneThread(dict[bytes, None]):
        def pop(self, *args: Any) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return super().pop(*args)

    store = MemoryStore()
    engine, request = Engine(store, waits=True), Request("a", 21)
    keep(engine, request, 1, 20)
    engine.core._known = OfOneThread(engine.core._known)
    engine.workers[0].close()
    store.kept.clear()
    until = time.monotonic() + 20
    while (found := engine.core.lookup(request, 0)) == LATER:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert found is None and len(engine.core._known) == 4, "the first block was asked for, and is not there"
    engine.core.close()


def test_blocks_of_the_end_are_given_up_first() -> None:
    store = MemoryStore()
    engine, request = Engine(store), Request("a", 21)
    keep(engine, request, 1, 20)
    engine.close()
    assert store.used == [page_key(b"me", 0, one) for one in request.block_keys(0)]


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_the_longest_prefix_that_all_tables_have(seed: int) -> None:
    """Against trying every length: of a sliding table only the blocks that are seen behind the prefix are needed."""
    rng = random.Random(seed)
    windows: list[Any] = [rng.choice([None, 2, 5, 9, 14]) for _ in range(rng.randint(1, 3))]
    store, request, first = MemoryStore(), Request("a", rng.randint(1, 60)), rng.randint(0, 3)
    for table in range(len(windows)):
        for one in request.block_keys(table):
            if rng.random() < 0.8:
                store.kept[page_key(b"me", table, one)] = np.zeros(0)
    limit = (len(request.token_ids) - 1) // BLOCK
    best = first
    for end in range(first, limit + 1):
        needed = [
            page_key(b"me", table, request.block_keys(table)[block])
            for table, window in enumerate(windows)
            for block in range(first, end)
            if window is None or (block + 1) * BLOCK > end * BLOCK - window + 1
        ]
        if all(key in store.kept for key in needed):
            best = end
    core = StoreScheduler(core_context(*windows), store, waits=False)
    found = core.lookup(request, first * BLOCK)
    assert (0 if found is None else found.num_tokens) == (best - first) * BLOCK


TOLD = {"do_remote_prefill": True, "do_remote_decode": False, "pool": True, "num_tokens": 20, "identity": b"me".hex()}


def going_on(**more: Any) -> Request:
    request = Request("b", 22)
    request.kv_transfer = {**TOLD, **more}
    return request


def test_who_computes_for_another_tells_what_is_there() -> None:
    one, request = Engine(MemoryStore()), Request("a", 22)
    request.kv_transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    assert one.core.finished(request, pages_of([1, 2, 3, 4, 5, 6])) == Held(TOLD)
    short = Request("c", 3)
    short.kv_transfer = request.kv_transfer
    assert one.core.finished(short, pages_of([1])) == Held(), "no whole block"
    assert one.core.finished(Request("d", 22), pages_of([1, 2, 3, 4, 5, 6])) == Held()
    one.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_prompt_waits_for_blocks_that_are_still_written(waits: bool) -> None:
    """As long as more of it comes; then what is missing is computed."""
    store, clock = MemoryStore(), Hands()
    first, second = Engine(store), Engine(store, waits=waits, clock=clock)
    request, whole = going_on(), Request("a", 22)

    def asked() -> Found | None:
        """What is found when the time to ask again has come, and the store has answered."""
        clock.now += ASK_AGAIN_SECONDS
        found = second.core.lookup(request, 0)
        if waits and (asking := second.core._asked.get("b")) is not None:
            asking.result(20)
            found = second.core.lookup(request, 0)
        return found

    assert asked() == LATER, "nothing has come"
    for blocks in (2, 4):
        clock.now += 0.9 * PATIENCE_SECONDS
        first.core.computed(whole, pages_of(list(range(1, 1 + blocks))), blocks * BLOCK)
        first.step()
        wait_for(lambda blocks=blocks: len(store.kept) == blocks)
        assert asked() == LATER, "more has come"
    clock.now += PATIENCE_SECONDS
    assert asked() == Found(16, asynchronous=True) == second.core.lookup(request, 0)
    assert second.core.counts()["never_came"] == 1
    second.core.aborted("b")
    first.core.computed(whole, pages_of(list(range(1, 6))), 20)
    first.step()
    wait_for(lambda: len(store.kept) == 5)
    assert asked() == Found(20, asynchronous=True), "all of it is there"
    for engine in (first, second):
        engine.close()


def test_a_prompt_that_comes_too_slowly_is_gone_on_from_what_has_come() -> None:
    """Before the engine gives up waiting for the store, and computes all of it."""
    store, clock = MemoryStore(), Hands()
    first = Engine(store)
    second = Engine(store, clock=clock, options=SimpleNamespace(lookup_seconds=3 * PATIENCE_SECONDS))
    request, whole = going_on(), Request("a", 22)
    for blocks in (1, 2):
        first.core.computed(whole, pages_of(list(range(1, 1 + blocks))), blocks * BLOCK)
        first.step()
        wait_for(lambda blocks=blocks: len(store.kept) == blocks)
        assert second.core.lookup(request, 0) == LATER
        clock.now += 0.8 * PATIENCE_SECONDS
    assert second.core.lookup(request, 0) == Found(2 * BLOCK, asynchronous=True)
    assert second.core.counts()["never_came"] == 1
    for engine in (first, second):
        engine.close()


def test_strangers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients name the engine: the first that is another is told, then each fiftieth request."""
    one = Engine(MemoryStore())
    for number in range(WARN_EVERY + 1):
        assert one.core.lookup(going_on(identity=f"{number:04x}"), 0) is None
    assert [record.args[-1] for record in caplog.records if "another model" in record.message] == [1, WARN_EVERY + 1]
    one.close()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize(
    "more", [{"identity": "aa"}, {"num_tokens": 3}, {"num_tokens": "x"}, {"pool": None}, {"do_remote_prefill": False}]
)
def test_a_prompt_that_cannot_come_does_not_wait(more: dict[str, Any]) -> None:
    one = Engine(MemoryStore())
    assert one.core.lookup(going_on(**more), 0) is None
    one.close()
