"""What connectors have of requests: one load after another, and what of them is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cores import layout_of, sliding
from steps import finish, make_scheduler, plan, request
from toy_store import ToyOptions

from engine.interfaces.kv_connector import LATER, Found, Held, KVConnectorScheduler, Pages, Transferable, Transferred
from engine.scheduling.scheduler import Scheduler
from engine.types.plan import StepResult


class Scripted(KVConnectorScheduler):
    """Answers lookups in turn; says at once that what travels has come."""

    def __init__(self, *answers: Found | None) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.allocations: list[tuple[int, int, list[Pages]]] = []
        self.loaded = ["a"]
        self.sent: list[str] = []
        self.seconds = 0.0
        self.told: list[str] = []
        self.raises: set[str] = set()

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what in self.raises:
            raise OSError("the line is cut")

    def finished(self, request: Transferable, pages: Sequence[Pages]) -> Held:
        self._tell(f"finished {request.request_id}")
        return Held({}, self.seconds)

    def aborted(self, request_id: str) -> None:
        self._tell(f"aborted {request_id}")

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        self.asked.append(num_local)
        return self.answers.pop(0) if self.answers else None

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        self.allocations.append((first, end, list(pages)))

    def take(self, news: Sequence[bytes]) -> Transferred:
        return Transferred(loaded=self.loaded, sent=self.sent)


def scripted(*answers: Found | None, **changes: Any) -> tuple[Scheduler, Scripted]:
    scheduler = make_scheduler(toy=ToyOptions(), **changes)
    half = Scripted(*answers)
    scheduler.connectors.members[0].half = half
    return scheduler, half


def arrive(scheduler: Scheduler) -> None:
    """With the next step the load of "a" has ended."""
    made = plan(scheduler)
    scheduler.update(StepResult(step_id=made.step_id, tokens=np.where(made.samples, 7, -1), news={"toy": [b"come"]}))
    scheduler.check_integrity()


def end(scheduler: Scheduler) -> None:
    while scheduler.requests:
        if scheduler.schedule() is not None or scheduler.outstanding:
            finish(scheduler)
    scheduler.check_integrity()
    assert not scheduler.kv.pool.leases and not scheduler.kv.pool.num_held


def test_one_load_after_another_leaves_no_page_behind() -> None:
    scheduler, half = scripted(None, Found(8, True), Found(4, True))
    scheduler.add(request("other", [1] * 9, max_tokens=20))
    scheduler.add(request("a", 20, max_tokens=2))
    arrive(scheduler)
    arrive(scheduler)
    assert half.asked == [0, 0, 8] and [entry[:2] for entry in half.allocations] == [(0, 8), (8, 12)]
    end(scheduler)


def test_what_was_loaded_before_a_reset_is_given_back() -> None:
    scheduler, half = scripted(None, Found(8, True), Found(8, True))
    scheduler.add(request("other", [1] * 9, max_tokens=20))
    scheduler.add(request("a", 20, max_tokens=2))
    plan(scheduler)
    scheduler.kv.reset_prefix_cache()
    finish(scheduler)
    arrive(scheduler)
    arrive(scheduler)
    assert half.asked == [0, 0, 0]
    end(scheduler)


def test_what_has_come_is_not_filled_again_with_what_is_found_beyond_it() -> None:
    scheduler, half = scripted(Found(8, True), Found(4))
    scheduler.add(request("a", 20, max_tokens=2))
    arrive(scheduler)
    plan(scheduler)
    first, last, (pages,) = half.allocations[-1]
    assert (first, last) == (8, 12) and pages.first_block == 2 and pages.pages.size == 1
    end(scheduler)


def test_a_load_takes_the_pages_alone_that_a_window_still_sees() -> None:
    scheduler, half = scripted(None, Found(12, True), layout=layout_of(sliding(7)), num_pages=5, max_num_seqs=1)
    scheduler.add(request("first", 9, max_tokens=1))
    end(scheduler)
    scheduler.add(request("a", 28, max_tokens=2))
    arrive(scheduler)
    end(scheduler)
    assert half.asked[1] == 8


def test_who_comes_back_is_looked_up_again() -> None:
    scheduler, half = scripted(Found(8), Found(8))
    scheduler.add(request("a", 20, max_tokens=4))
    plan(scheduler)
    finish(scheduler)
    scheduler.kv.reset_prefix_cache()
    scheduler.states.preempt(scheduler.requests["a"])
    plan(scheduler)
    assert half.asked == [0, 0]
    end(scheduler)


def run_out(scheduler: Scheduler) -> None:
    """Until no request is left; pages may stay lent."""
    while scheduler.requests:
        if scheduler.schedule() is not None or scheduler.outstanding:
            finish(scheduler)


def counts(scheduler: Scheduler) -> dict[str, int]:
    return {name: count for _, name, count in scheduler.connectors.counts()}


def test_a_name_that_comes_again_lets_go_of_what_is_held_under_it() -> None:
    scheduler, half = scripted()
    half.seconds = 60.0
    half.loaded = []
    scheduler.add(request("a", 8, max_tokens=1))
    run_out(scheduler)
    (first,) = scheduler.kv.pool.leases
    scheduler.add(request("a", [3] * 8, max_tokens=1))
    assert half.told == ["finished a", "aborted a"] and not scheduler.kv.pool.leases
    run_out(scheduler)
    (second,) = scheduler.kv.pool.leases
    assert second != first and half.told[-1] == "finished a"
    half.sent = ["a"]
    half.seconds = 0.0
    scheduler.add(request("other", 5, max_tokens=1))
    arrive(scheduler)
    assert not scheduler.kv.pool.leases


@pytest.mark.parametrize("raises", ["aborted a", "finished a"])
def test_an_error_over_a_request_that_has_ended_loses_no_page_and_is_counted(
    raises: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, half = scripted()
    half.seconds = 1.0
    half.loaded = []
    half.raises = {raises}
    scheduler.add(request("a", 8, max_tokens=1))
    run_out(scheduler)
    scheduler.slots.now = lambda: 10.0**9
    scheduler.add(request("other", 5, max_tokens=1))
    run_out(scheduler)
    assert len(scheduler.kv.pool.leases) == 1  # that of "other", which is held from then on
    assert counts(scheduler)["errors"] == 1
    assert sum("the line is cut" in (record.exc_text or "") for record in caplog.records) == 1


def test_who_is_never_told_computes_after_a_while() -> None:
    scheduler, half = scripted(*[LATER] * 1000)
    scheduler.connectors.members[0].lookup_seconds = 5.0
    now = 100.0
    scheduler.slots.now = lambda: now
    scheduler.add(request("a", 20, max_tokens=2))
    while not scheduler.running:
        assert now < 108, "it waits for ever"
        scheduler.schedule()
        now += 1
    assert counts(scheduler)["late_lookups"] == 1 and len(half.asked) == 7
    end(scheduler)


def test_loads_under_way_leave_half_of_the_pool_to_those_that_run() -> None:
    scheduler, half = scripted(*[Found(16, True)] * 20, num_pages=21)
    for name in range(4):
        scheduler.add(request(f"{name}", [name] * 17, max_tokens=2))
    scheduler.schedule()
    assert len(half.allocations) == 2 and len(scheduler.connectors.waiting) == 4
    scheduler.slots.now = lambda: 10.0**9  # nothing comes: the others compute
    run_until = [name for name in scheduler.requests if name in "23"]
    while set(run_until) & scheduler.requests.keys():
        if scheduler.schedule() is not None or scheduler.outstanding:
            made = scheduler.outstanding[0]
            scheduler.update(StepResult(step_id=made.step_id, tokens=np.where(made.samples, 7, -1).astype(np.int32)))
    assert not scheduler.num_preemptions and counts(scheduler)["late_lookups"] == 2
    half.loaded = ["0", "1"]
    arrive(scheduler)
    end(scheduler)


def test_what_has_come_for_the_queue_goes_before_who_runs() -> None:
    scheduler, _ = scripted(None, Found(16, True), None, None, num_pages=10, max_num_seqs=2)
    scheduler.add(request("runs", [1] * 7, max_tokens=10))
    scheduler.add(request("a", 17, max_tokens=1))
    scheduler.add(request("also", [2] * 3, max_tokens=10))
    arrive(scheduler)
    assert scheduler.running.keys() == {"runs", "also"} and len(scheduler.kv.pool.leases) == 1
    end(scheduler)
    assert not scheduler.num_preemptions


def test_prompt_tokens_count_once_for_the_connector_that_had_them() -> None:
    """Also those of both kinds of loads together; a request that comes back after preemption counts nothing more."""
    scheduler, _ = scripted(Found(8, True), Found(4), Found(12))
    scheduler.add(request("a", 20, max_tokens=4))
    arrive(scheduler)
    plan(scheduler)
    counted = scheduler.connectors.members[0].counts
    assert (counted["hit_tokens"], scheduler.admission.prefix_hits, scheduler.admission.prefix_queries) == (12, 0, 20)
    finish(scheduler)
    scheduler.kv.reset_prefix_cache()
    scheduler.states.preempt(scheduler.requests["a"])
    end(scheduler)
    assert (counted["hit_tokens"], counted["loaded_tokens"]) == (12, 24)
