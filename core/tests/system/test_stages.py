"""Pipeline stages as threads, with the real runner in float64: under any schedule each request gets the tokens that it
gets alone from one worker, and the stages work at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, run_schedule, schedules
from test_real_schedules import VOCAB, check, make_core, with_sampling, worker_for

from engine.types.parallel import Parallel
from engine.types.params import SamplingParams

PARALLEL = (
    Parallel(pp=2),
    Parallel(pp=2, split=(1, 2)),
    Parallel(pp=3),
    Parallel(pp=2, tp=2),
)
TWO_CAPTURED = pytest.param(PARALLEL[0], marks=pytest.mark.slow)
"""Two even stages run in `test_captured_decode_steps`."""
THREE_CROWDED = pytest.param(PARALLEL[2], marks=pytest.mark.slow)
"""Three run in `test_in_a_crowded_cache`."""


def run(schedule: Schedule, seed: int, parallel: Parallel, buckets: bool = False) -> None:
    schedule = with_sampling(schedule, seed)
    schedule = replace(schedule, settings=replace(schedule.settings, in_flight=parallel.pp + 1))
    core, executor = make_core(schedule.settings, buckets, parallel)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    assert executor.num_placeholders == 0, "the first stage sees no token drawn"
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"swapped: {min(core.stats().num_swap_preemptions, 3)}")
    event(f"jumps: {core.stats().num_accepted_jump_tokens > 0}")
    event(f"under way: {executor.most_in_flight}")


@pytest.mark.parametrize("parallel", [TWO_CAPTURED, PARALLEL[1], THREE_CROWDED, PARALLEL[3]], ids=str)
@given(schedule=schedules(VOCAB, max_requests=6), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)


@pytest.mark.parametrize("parallel", [pytest.param(PARALLEL[1], marks=pytest.mark.slow), PARALLEL[2]], ids=str)
@given(schedule=schedules(VOCAB, max_requests=5, crowded=True), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_in_a_crowded_cache(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)


@given(schedule=schedules(VOCAB, max_requests=6), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_captured_decode_steps(schedule: Schedule, seed: int) -> None:
    """Each stage replays its own, padded to buckets; what travels has the plan's rows."""
    run(schedule, seed, PARALLEL[0], buckets=True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
@given(schedule=st.booleans().flatmap(lambda crowded: schedules(VOCAB, crowded=crowded)), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)


def test_a_stage_computes_while_the_next_one_does() -> None:
    """While the last stage computes a plan of decodes, the first has begun the plan after it."""
    settings = Settings(
        num_pages=200, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, in_flight=3,
        enable_prefix_caching=False, hold=False,
    )  # fmt: skip
    like = replace(settings, in_flight=1, num_drafts=0, adaptive=True)
    crew: Any = worker_for(like, False, PARALLEL[0], False)[0]  # as `make_core` asks for it: kept by what it is asked
    began = [threading.Event() for _ in range(40)]
    waited: list[bool] = []
    first, last = crew.workers
    rows: dict[int, int] = {}

    def begin(plan: Any) -> Any:
        rows[plan.step_id] = plan.num_rows
        began[plan.step_id].set()
        return type(first).execute(first, plan)

    def follow(plan: Any) -> Any:
        if 4 <= plan.step_id < 12:  # all requests decode by then, and none has ended
            waited.append(began[plan.step_id + 1].wait(20))
        return type(last).execute(last, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "execute", begin, raising=False)
        patch.setattr(last, "execute", follow, raising=False)
        core, _ = make_core(settings, parallel=PARALLEL[0])
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=0)
        requests = tuple(Planned(request_id=f"r{i}", prompt=(i + 1, 2), params=params) for i in range(4))
        outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    assert len(waited) == 8 and all(waited)
    assert {rows[step] for step in range(4, 12)} == {2}, "each plan has half of those that decode"
    for request in requests:
        check(request, outcomes[request.request_id])
