"""Policies go by a clock that nobody sets."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest
from cores import LAYOUTS, make_core
from steps import SETTINGS, request, run

from engine.frontend.input_processor import SteadyClock
from engine_reference.policy_priority import Priority, PriorityOptions


@pytest.mark.parametrize("aging", [None, 10.0])
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_setting_the_clock_changes_nobodys_place(
    monkeypatch: pytest.MonkeyPatch, jump: float, aging: float | None
) -> None:
    options = PriorityOptions(aging_seconds=aging)
    settings = replace(SETTINGS, max_num_seqs=1)
    core, _ = make_core(LAYOUTS["full"], settings, policy=lambda c: Priority(replace(c, options=options)))
    clock, true = SteadyClock(), time.time
    for i in range(6):
        if i == 3:
            monkeypatch.setattr(time, "time", lambda: true() + jump)
        level = int(i == 4)  # a less urgent one
        core.add_request(
            msgspec.structs.replace(request(f"r{i}", [i], max_tokens=1), arrival_time=clock.now(), priority=level)
        )
    ended = [output.request_id for output in run(core.scheduler) if output.finish_reason is not None]
    assert ended == ["r0", "r1", "r2", "r3", "r5", "r4"]


def test_a_request_may_say_that_it_came_earlier() -> None:
    options = PriorityOptions(aging_seconds=10.0)
    settings = replace(SETTINGS, max_num_seqs=1)
    core, _ = make_core(LAYOUTS["full"], settings, policy=lambda c: Priority(replace(c, options=options)))
    now = time.time()
    for name, arrived in (("now", now), ("later", now + 1e6), ("earlier", now - 5.0)):
        core.add_request(msgspec.structs.replace(request(name, [1], max_tokens=1), arrival_time=arrived))
    ended = [output.request_id for output in run(core.scheduler) if output.finish_reason is not None]
    assert ended == ["earlier", "now", "later"]
