"""A step's cost does not grow with the queue: counted in calls of Python functions, not in time."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from cores import LAYOUTS, make_core
from steps import SETTINGS, finish, plan, request

from engine.scheduling.scheduler import Scheduler


def calls_of_a_step(scheduler: Scheduler) -> int:
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        plan(scheduler)
        finish_quietly(scheduler)
    finally:
        sys.setprofile(None)
    return count


def finish_quietly(scheduler: Scheduler) -> None:
    check, scheduler.check_integrity = scheduler.check_integrity, lambda: None  # type: ignore[method-assign]
    finish(scheduler)
    scheduler.check_integrity = check  # type: ignore[method-assign]


def steady(num_running: int, num_waiting: int) -> Scheduler:
    """A scheduler with all slots decoding, at a step that fills no block."""
    settings = dataclasses.replace(
        SETTINGS, num_pages=4000, max_num_seqs=num_running, max_num_batched_tokens=2000, max_model_len=256
    )
    scheduler = make_core(LAYOUTS["full"], settings)[0].scheduler
    for i in range(num_running + num_waiting):
        scheduler.add(request(f"r{i}", [i % 13, i // 13, 1, 2, 3, 4], max_tokens=200))
    while len(scheduler.running) < num_running or scheduler.prefilling:
        plan(scheduler)
        finish_quietly(scheduler)
    return scheduler


@pytest.mark.parametrize("num_running", [1, 16])
def test_a_step_costs_the_same_whatever_waits(num_running: int) -> None:
    costs = {waiting: calls_of_a_step(steady(num_running, waiting)) for waiting in (0, 10, 2000)}
    assert costs[10] == costs[2000] and costs[0] <= costs[10]


def test_a_decoding_row_costs_no_python_but_its_output() -> None:
    few, many = calls_of_a_step(steady(16, 0)), calls_of_a_step(steady(128, 0))
    assert many == few
