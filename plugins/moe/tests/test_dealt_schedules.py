"""Experts dealt over ranks under the schedules of the core's own tests, in float64: any chunks, prefix hits,
preemptions, steps in flight and aborts give each request exactly the tokens that it gets alone from one rank, also
while experts move. Ranks are threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_real_schedules as real
from dealt_harness import EXPERTS, each_way
from harness import VOCAB
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, examples, run_schedule, schedules

from engine.interfaces.step import StepPart
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine_moe.dealt.rebalancing import Rebalancing

QUICK = ("gather, moving",)


def moved(core: Any) -> int:
    """Experts that came to another place, on the ranks of the core."""
    parts: list[StepPart] = [part for worker in core.executor.worker.workers for part in worker._runner._parts]
    return sum(part.moved for part in parts if isinstance(part, Rebalancing))


@each_way(*QUICK)
@given(schedule=schedules(VOCAB, max_requests=5), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(2), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(way: Parallel, schedule: Schedule, seed: int) -> None:
    schedule = real.with_sampling(schedule, seed)
    schedule = replace(schedule, settings=replace(schedule.settings, in_flight=way.pp + 1))
    core, _ = real.make_core(schedule.settings, parallel=way)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        real.check(request, outcomes[request.request_id])


@each_way("gather, moving", "all_to_all, moving", moving=True)
def test_experts_move_while_requests_run(way: Parallel) -> None:
    settings = Settings(
        num_pages=26, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=way.pp + 1,
        enable_prefix_caching=True,
    )  # fmt: skip
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=tuple((7 * i + j) % VOCAB for j in range(3 + i)),
            params=SamplingParams(temperature=(i % 3) * 0.6, max_tokens=21, seed=i, ignore_eos=True),
            arrives=i // 3,
        )
        for i in range(7)
    )
    core, _ = real.make_core(settings, parallel=way)
    before = moved(core)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        real.check(request, outcomes[request.request_id])
    assert core.stats().num_preemptions > 0
    assert moved(core) > before, "nothing moved"
    crew: Any = core.executor
    counted = [sum(numbers) for numbers in zip(*crew.worker.call("expert_tokens"), strict=True)]
    assert len(counted) == EXPERTS and min(counted) > 0


@pytest.mark.slow
@each_way()
@given(schedule=st.booleans().flatmap(lambda crowded: schedules(VOCAB, crowded=crowded)), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(way: Parallel, schedule: Schedule, seed: int) -> None:
    schedule = real.with_sampling(schedule, seed)
    schedule = replace(schedule, settings=replace(schedule.settings, in_flight=way.pp + 1))
    core, _ = real.make_core(schedule.settings, parallel=way)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        real.check(request, outcomes[request.request_id])
