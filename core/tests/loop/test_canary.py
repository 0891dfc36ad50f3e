"""The canary finds each kind of page that does not hold what it should, and no request gets a token from one.

Faults are planted in the way of pages: in a connector, in a swap tier, in the pool, in the scheduler's books.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cores import FULL, LAYOUTS, layout_of, make_core, mismatches, sliding
from paged_worker import HoldingExecutor, alone
from schedules import Settings
from toy_store import Shelf, ToyOptions, ToyScheduler, ToyWorker

from engine.loop.engine_core import EngineCore
from engine.types.kv import MARK_BYTES, KVLayout
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest

SETTINGS = Settings(
    num_pages=60,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    in_flight=2,
    enable_prefix_caching=True,
    canary=True,
)
PROMPT = [1 + i * 5 % 12 for i in range(21)]


@pytest.fixture(autouse=True)
def shelf() -> Iterator[Shelf]:
    ToyScheduler.shelf = Shelf()
    yield ToyScheduler.shelf


def core_of(layout: str | KVLayout = "full", **changes: Any) -> tuple[EngineCore, HoldingExecutor]:
    chosen = dataclasses.replace(SETTINGS, **changes)
    return make_core(LAYOUTS[layout] if isinstance(layout, str) else layout, chosen)


def request(name: str, prompt: list[int], max_tokens: int = 6) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0, eos_token_ids=[0])


def run(core: EngineCore, *requests: EngineRequest, each: Callable[[], None] | None = None) -> dict[str, Any]:
    """The tokens of each, or its error."""
    got: dict[str, Any] = {one.request_id: [] for one in requests}
    for one in requests:
        core.add_request(one)
    for _ in range(500):
        if not core.has_work():
            break
        for output in core.step().outputs:
            if output.error is not None:
                got[output.request_id] = output.error
            else:
                got[output.request_id] += output.new_token_ids
        if each is not None:
            each()
    assert not core.has_work()
    return got


def right(core: EngineCore, one: EngineRequest) -> list[int]:
    layout = core.scheduler.kv.layout
    return alone(layout, one.prompt_token_ids, one.params, one.eos_token_ids, SETTINGS.max_model_len)[0]


# -- a store's faults --------------------------------------------------------------------------------------------------
def swap_two(shelf: Shelf) -> None:
    first, second = list(shelf.pages)[:2]
    shelf.pages[first], shelf.pages[second] = shelf.pages[second], shelf.pages[first]


def stale(shelf: Shelf) -> None:
    """One page holds what the last one of an older prompt held."""
    names = list(shelf.pages)
    shelf.pages[names[1]] = shelf.pages[names[-1]].clone()


def flip(shelf: Shelf) -> None:
    page = next(iter(shelf.pages.values()))
    page[5] ^= 4


def cut(shelf: Shelf) -> None:
    page = next(iter(shelf.pages.values()))
    page[page.numel() // 2 :] = 0


def cut_before_the_mark(shelf: Shelf) -> None:
    page = next(iter(shelf.pages.values()))
    page[page.numel() - MARK_BYTES - 8 : page.numel() - MARK_BYTES] = 0


def of_another_rank(shelf: Shelf) -> None:
    """What rank 1 of an engine has computed, under names that are not told apart."""
    shelf.pages.clear()
    shelf.keys.clear()
    core, executor = core_of(toy=ToyOptions())
    executor.worker.connectors["canary"]._rank = 1
    run(core, request("a", PROMPT))


def of_another_model(shelf: Shelf) -> None:
    """What an engine of another identity has computed for the same tokens, under names that are not told apart."""
    shelf.pages.clear()
    shelf.keys.clear()
    core, _ = core_of(toy=ToyOptions())
    core.scheduler.connectors.members[0].half._identity = b"another"  # type: ignore[attr-defined]
    run(core, request("a", PROMPT))


def layers_out_of_order(shelf: Shelf) -> None:
    page = next(iter(shelf.pages.values()))
    page[:64] = page[:64].reshape(2, 32).flip(0).reshape(-1).clone()


STORED = [swap_two, stale, flip, cut, cut_before_the_mark, of_another_rank, of_another_model, layers_out_of_order]


@pytest.mark.parametrize("asynchronous", [0.0, 1.0], ids=["at once", "by and by"])
@pytest.mark.parametrize("fault", STORED)
def test_a_stores_faults(fault: Callable[[Shelf], None], asynchronous: float, shelf: Shelf) -> None:
    layout = LAYOUTS["full"] if fault in (of_another_rank, of_another_model) else layout_of(FULL, FULL)
    first, _ = core_of(layout, toy=ToyOptions())
    run(first, request("a", PROMPT), request("older", [9 - i % 7 for i in range(21)]))
    again = request("again", [*PROMPT, 3, 3])
    for plant, alarmed in ((None, False), (fault, True)):
        if plant is not None:
            plant(shelf)
        core, _ = core_of(layout, toy=ToyOptions(asynchronous=asynchronous))
        assert run(core, again)["again"] == right(core, again)
        assert core.stats().kv_connectors and bool(mismatches(core)) is alarmed


@pytest.mark.parametrize("asynchronous", [0.0, 1.0], ids=["at once", "by and by"])
def test_a_load_that_is_told_before_it_is_there(
    asynchronous: float, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = core_of(toy=ToyOptions())
    run(first, request("a", PROMPT))
    monkeypatch.setattr(ToyWorker, "_fill", lambda self, key, page: None)
    second, _ = core_of(toy=ToyOptions(asynchronous=asynchronous))
    again = request("again", [*PROMPT, 3, 3])
    assert run(second, again)["again"] == right(second, again)
    assert mismatches(second) > 0


# -- a swap tier's, the pool's, the scheduler's ------------------------------------------------------------------------
@pytest.mark.parametrize("fault", ["swapped", "flipped"])
def test_a_swap_tiers_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = core_of(num_pages=14, swap_pages=100, max_num_seqs=2)
    host = executor.worker.connectors["host"]
    load = host.load

    def wrong(step_id: int) -> None:
        load(step_id)
        pages = [] if host._copies is None else host._copies.in_page.tolist()  # type: ignore[attr-defined]
        if len(pages) > 1 and fault == "swapped":
            cells = executor.worker.cells
            cells[pages[:2]] = cells[pages[1::-1]]
        elif pages:
            executor.worker.cells[pages[0], 0] ^= np.uint64(1)

    monkeypatch.setattr(host, "load", wrong)
    asked = [request(name, [ord(name) % 13] * 9 + PROMPT[:4], 30) for name in "ab"]
    got = run(core, *asked)
    assert core.stats().num_swap_preemptions > 0 and mismatches(core) > 0
    assert [got[one.request_id] for one in asked] == [right(core, one) for one in asked]


def test_bytes_that_change_in_a_cached_page() -> None:
    core, executor = core_of()
    run(core, request("a", PROMPT))
    page = int(np.flatnonzero(core.scheduler.kv.pool.committed)[0])
    executor.worker.cells[page, 1] ^= np.uint64(8)
    again = request("again", [*PROMPT, 3])
    assert run(core, again)["again"] == right(core, again)
    assert mismatches(core) == 1


def test_an_index_that_names_a_page_which_others_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = core_of(num_pages=12)
    run(core, request("a", PROMPT))
    index = core.scheduler.kv.index
    before = dict(index._pages)
    for number in range(3):
        run(core, request(f"other {number}", [2 + number + i % 3 for i in range(24)]))
    gone = {key: page for key, page in before.items() if key not in index._pages}
    monkeypatch.setattr(index, "page_of", lambda key: index._pages.get(key, gone.get(key)))
    core.add_request(request("again", [*PROMPT, 3]))
    for _ in range(3):
        core.step()
    assert gone and mismatches(core) > 0


def test_a_page_that_is_freed_in_use_ends_its_request() -> None:
    core, _ = core_of(num_pages=30, max_num_seqs=3)
    kv = core.scheduler.kv
    victim = request("victim", PROMPT[:9], 40)
    core.add_request(victim)
    for _ in range(4):
        core.step()
    (slot,) = np.flatnonzero(kv.tables[0].num_blocks)
    stolen = kv.tables[0].pages[slot, :1].copy()
    kv.pool.discard(stolen)
    kv.pool.release(stolen, 0)
    core.add_request(request("thief", [7] * 30, 30))
    error = None
    for _ in range(60):
        for output in core.step().outputs:
            if output.request_id == "victim" and output.error is not None:
                error = output.error
        if error is not None:
            break
    assert error is not None and "was given out anew" in error[2] and mismatches(core) == 1


def test_a_copy_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = core_of()
    run(core, request("a", PROMPT))
    monkeypatch.setattr(executor.worker, "_copy_pages", lambda plan: None)
    again = request("again", [*PROMPT[:18], 3, 3])
    assert run(core, again)["again"] == right(core, again)
    assert mismatches(core) > 0


# -- what it says, and what it does not --------------------------------------------------------------------------------
def test_the_log_says_what_was_expected_and_found(caplog: pytest.LogCaptureFixture) -> None:
    core, executor = core_of()
    run(core, request("a", PROMPT))
    first, second = np.flatnonzero(core.scheduler.kv.pool.committed)[:2].tolist()
    cells = executor.worker.cells
    cells[[first, second]] = cells[[second, first]]
    with caplog.at_level(logging.ERROR):
        run(core, request("again", [*PROMPT, 3]))
    (said, *_) = [record.getMessage() for record in caplog.records if "does not hold" in record.getMessage()]
    assert "(found, step" in said and "expected block" in said and "found block" in said and "rank 0" in said


def test_without_it_nothing_is_marked_or_called() -> None:
    core, executor = core_of(canary=False)
    sections: list[Any] = []
    execute = executor.execute
    executor.execute = lambda plan: (sections.append(plan.sections), execute(plan))[1]  # type: ignore[method-assign]
    run(core, request("a", PROMPT))
    assert not any(sections) and not core.scheduler.kv.layout.mark_bytes and not core.scheduler.connectors.members


def test_windows_give_pages_back_without_alarm() -> None:
    core, _ = core_of(layout_of(FULL, sliding(6)), num_pages=40, max_num_seqs=3)
    asked = [request(f"{n}", [*PROMPT[: 4 + n], n], 30) for n in range(6)]
    got = run(core, *asked)
    assert [got[one.request_id] for one in asked] == [right(core, one) for one in asked]
    assert not mismatches(core)
