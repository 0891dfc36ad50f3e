"""A request with a deadline ends in any state, with a typed error and its pages back; clocks that jump do no harm."""

from __future__ import annotations

import time

import msgspec
import pytest
from steps import finish, make_scheduler, plan, request, run

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.states import Deadlines
from engine.types.outputs import CoreOutput
from engine.types.request import EngineRequest


def limited(name: str, prompt: int | list[int] = 5, timeout: float | None = 1.0, **changes: object) -> EngineRequest:
    return msgspec.structs.replace(request(name, prompt, **changes), timeout=timeout)


def with_clock(**changes: int) -> tuple[Scheduler, list[float]]:
    """A scheduler, and the time that it goes by."""
    scheduler, now = make_scheduler(**changes), [100.0]
    scheduler.states.deadlines.clock = lambda: now[0]
    return scheduler, now


def errors(outputs: list[CoreOutput]) -> dict[str, str]:
    return {output.request_id: output.error[0] for output in outputs if output.error is not None}


def drained(scheduler: Scheduler) -> None:
    while scheduler.outstanding:
        finish(scheduler)
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_held == 0 and not scheduler.requests and not scheduler.states.deadlines


def test_a_waiting_a_held_and_a_running_request() -> None:
    scheduler, now = with_clock(max_num_seqs=2)
    scheduler.add(limited("running", 5, max_tokens=50))
    scheduler.add(limited("lead", [1] * 40, parent="p"))  # two chunks: its siblings are held meanwhile
    scheduler.add(limited("held", [1] * 40, parent="p"))
    scheduler.add(limited("waiting", [9] * 5))
    plan(scheduler)
    assert len(scheduler.states.groups) == 1 and scheduler.num_waiting == 2
    now[0] = 100.9
    plan(scheduler)
    finish(scheduler)
    assert not scheduler.take_notices()
    now[0] = 101.0
    scheduler.schedule()
    notices = scheduler.take_notices()
    assert errors(notices) == dict.fromkeys(["running", "lead", "held", "waiting"], "request_timeout")
    assert "in 1 s" in notices[0].error[1] and "1 of its output tokens" in notices[0].error[2]
    drained(scheduler)


def test_a_draining_request() -> None:
    scheduler, now = with_clock(num_pages=5)
    scheduler.add(request("a", [1] * 8))
    scheduler.add(limited("b", [2] * 7))
    plan(scheduler)
    assert scheduler.schedule() is None and scheduler.states.draining, "b was preempted while a step names it"
    now[0] = 200.0
    assert scheduler.schedule() is None
    assert errors(scheduler.take_notices()) == {"b": "request_timeout"} and not scheduler.states.draining
    assert [o.request_id for o in finish(scheduler)] == ["a"], "its token is surplus"
    run(scheduler)
    drained(scheduler)


def test_a_request_that_ends_in_time_leaves_nothing_behind() -> None:
    scheduler, now = with_clock()
    scheduler.add(limited("a", timeout=5.0, max_tokens=2))
    scheduler.add(limited("too long a prompt for the cache", [3] * 60, timeout=5.0))
    assert not errors(run(scheduler))
    now[0] = 1e9
    assert not scheduler.states.deadlines and not scheduler.take_notices()


def test_who_has_no_deadline_never_asks_for_the_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, max_tokens=20))
    plan(scheduler)
    finish(scheduler)
    scheduler.states.deadlines.clock = lambda: 1 / 0
    plan(scheduler)


def test_a_wall_clock_that_jumps_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 1e12, -1e12, 5.0] * 100)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add(msgspec.structs.replace(limited(name, timeout=60.0, max_tokens=3), arrival_time=time.time()))
    ends = [output for output in run(scheduler) if output.finish_reason is not None]
    assert [(end.request_id, end.finish_reason) for end in ends] == [(name, "length") for name in "abc"]


def test_the_heap_forgets_requests_that_ended() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(limited("stays", timeout=1e6, max_tokens=50))
    for i in range(1000):
        scheduler.add(limited(f"r{i}", timeout=1e5))
        scheduler.abort([f"r{i}"])
    deadlines: Deadlines = scheduler.states.deadlines
    assert len(deadlines) == 1 and len(deadlines._heap) < 100
