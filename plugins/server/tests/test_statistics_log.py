"""The line of statistics: said while there is work, about the time since the last one."""

from __future__ import annotations

import asyncio

import pytest

from engine.types.outputs import StepStats
from engine_server.lifecycle import StatisticsLog


class Engine:
    def __init__(self):
        self.last_stats, self.num_unfinished = None, 0

    def now(self, **changes):
        old = {} if self.last_stats is None else {f: getattr(self.last_stats, f) for f in StepStats.__struct_fields__}
        blank = dict.fromkeys(StepStats.__struct_fields__, 0) | {"pages_total": 200}
        self.last_stats = StepStats(**(blank | old | changes))


@pytest.fixture
def watched():
    engine, clock = Engine(), [100.0]
    return engine, clock, StatisticsLog(engine, clock=lambda: clock[0])


def test_rates_are_of_the_time_since_the_last_line(watched):
    engine, clock, log = watched
    engine.num_unfinished = 5
    engine.now(num_running=3, num_waiting=2, prompt_tokens=30_000, generation_tokens=50, pages_used=50,
               prefix_queries=400, prefix_hits=100)  # fmt: skip
    clock[0] += 10
    assert log.line() == (
        "running 3, waiting 2, prompt 3,000.0 tokens/s, generation 5.0 tokens/s, KV cache 25.0 %, prefix hits 25.0 %"
    )
    engine.now(generation_tokens=60, num_preemptions=4)
    clock[0] += 5
    assert log.line() == (
        "running 3, waiting 2, prompt 0.0 tokens/s, generation 2.0 tokens/s, KV cache 25.0 %, preempted 4"
    )


def test_silence_while_there_is_nothing_to_do(watched):
    engine, clock, log = watched
    assert log.line() is None
    engine.num_unfinished = 1
    assert log.line() == "running 0, waiting 1"
    engine.now(generation_tokens=5)
    engine.num_unfinished = 0
    clock[0] += 10
    assert "running 0, waiting 0" in log.line()  # it ended since the last line: this is told once
    assert log.line() is None


def test_requests_that_the_core_has_not_told_of_are_waiting(watched):
    engine, _, log = watched
    engine.now()
    engine.num_unfinished = 7
    assert log.line().startswith("running 0, waiting 7,")


async def test_it_writes_while_it_runs_and_ends_when_cancelled():
    engine, said = Engine(), asyncio.Queue()
    engine.num_unfinished = 1
    task = asyncio.create_task(StatisticsLog(engine, said.put_nowait).run(interval=0))
    assert await said.get() == await said.get() == "running 0, waiting 1"
    engine.num_unfinished = 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
