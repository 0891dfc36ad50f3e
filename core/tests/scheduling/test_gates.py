"""Requests that wait at gates: in any order they come through, fail or end, and the loop sleeps meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from cores import LAYOUTS, make_core
from hypothesis import given
from hypothesis import strategies as st
from steps import SETTINGS, finish, make_scheduler, request

from engine.loop import engine_core
from engine.scheduling.gates import Gates
from engine.scheduling.slots import Request, Status
from engine.types.errors import EngineError
from engine.types.outputs import CoreOutput
from engine.types.request import FinishReason


class Toy:
    """Requests whose id has its letter wait here until `open` lets them through, or turns them away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: dict[str, Request] = {}
        self.closed = False
        self._ready: list[tuple[Request, EngineError | None]] = []
        self._wake: Callable[[], None] | None = None

    def begin(self, request: Request, wake: Callable[[], None]) -> bool:
        if self.name in request.request_id:
            self.waiting[request.request_id] = request
            self._wake = wake
        return self.name in request.request_id

    def open(self, request_id: str, error: EngineError | None = None) -> None:
        self._ready.append((self.waiting.pop(request_id), error))
        assert self._wake is not None
        self._wake()

    def ready(self) -> list[tuple[Request, EngineError | None]]:
        told, self._ready = self._ready, []
        return told

    def forget(self, request: Request) -> None:
        self.waiting.pop(request.request_id, None)
        self._ready = [(other, error) for other, error in self._ready if other is not request]

    def shutdown(self) -> None:
        self.closed = True


def test_it_waits_at_all_gates_and_others_go_on() -> None:
    a, b = Toy("a"), Toy("b")
    scheduler = make_scheduler()
    scheduler.states.gates = Gates([a, b])
    for name in ("ab", "x"):
        scheduler.add(request(name))
    held = scheduler.requests["ab"]
    assert held.status is Status.PENDING and a.waiting and b.waiting
    made = scheduler.schedule()
    assert made is not None and [new.request_id for new in made.new_slots] == ["x"]
    b.open("ab")
    finish(scheduler)
    scheduler.schedule()
    assert held.status is Status.PENDING and a.waiting and not b.waiting
    a.open("ab")
    scheduler.schedule()
    assert held.status is Status.RUNNING


def test_one_gate_turns_it_away_and_the_other_forgets_it() -> None:
    a, b = Toy("a"), Toy("b")
    scheduler = make_scheduler()
    scheduler.states.gates = Gates([a, b])
    scheduler.add(request("ab"))
    b.open("ab")
    a.open("ab", EngineError("load", "it is gone"))  # both have news at once
    assert scheduler.schedule() is None
    (notice,) = scheduler.take_notices()
    assert notice.finish_reason == FinishReason.ERROR and not scheduler.requests and not b.ready()


@given(st.integers(0, 10**6))
def test_whatever_the_order_every_request_ends_once(seed: int) -> None:
    rng = random.Random(seed)
    gates = [Toy(letter) for letter in "abc"]
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.states.gates = Gates(gates)
    names = [f"{i} {''.join(rng.sample('abc', rng.randint(0, 3)))}" for i in range(rng.randint(1, 8))]
    left, ended = list(names), list[CoreOutput]()
    while left or scheduler.has_work:
        choice = rng.randrange(4)
        if choice == 0 and left:
            scheduler.add(request(left.pop(), max_tokens=rng.randint(1, 4)))
        elif choice == 1 and (open_gates := [gate for gate in gates if gate.waiting]):
            gate = rng.choice(open_gates)
            gate.open(rng.choice(list(gate.waiting)), EngineError("load", "lost") if rng.random() < 0.2 else None)
        elif choice == 2 and rng.random() < 0.2 and scheduler.requests:
            scheduler.abort([rng.choice(list(scheduler.requests))])
        elif scheduler.schedule() is not None or scheduler.outstanding:
            ended += [output for output in finish(scheduler) if output.finish_reason is not None]
        ended += scheduler.take_notices()
        scheduler.check_integrity()
    assert sorted(output.request_id for output in ended) == sorted(names)
    assert not any(gate.waiting for gate in gates)


def test_the_loop_sleeps_until_a_gate_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "WAIT_SECONDS", 60.0)
    core, _ = make_core(LAYOUTS["full"], SETTINGS)
    gate = Toy("a")
    core.scheduler.states.gates = Gates([gate])
    core.add_request(request("a"))
    threading.Timer(0.05, gate.open, ("a",)).start()
    steps = 0
    while core.has_work():
        core.step()
        steps += 1
    assert steps < 16  # one sleeps; the others compute 8 tokens
    core.shutdown()
    assert gate.closed


def test_news_of_somebody_who_is_gone_keeps_nobody_awake() -> None:
    gates = Gates([gate := Toy("a")])
    scheduler = make_scheduler()
    scheduler.states.gates = gates
    scheduler.add(request("a"))
    gate.open("a")
    scheduler.abort(["a"])
    scheduler.schedule()
    gates.wait(0.0)  # takes the news in
    begin = time.monotonic()
    gates.wait(0.05)
    assert time.monotonic() - begin >= 0.04


def test_what_has_to_be_told_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "WAIT_SECONDS", 60.0)
    core, _ = make_core(LAYOUTS["full"], SETTINGS)
    core.scheduler.states.gates = Gates([Toy("a")])
    core.add_request(request("a 1"))
    core.add_request(request("a 2"))
    core.abort(["a 1"])
    assert [output.request_id for output in core.step().outputs] == ["a 1"]
