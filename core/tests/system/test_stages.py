"""Pipeline stages as threads, with the real runner in float64: under any schedule each request gets the tokens that it
gets alone from one worker, and the stages work at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import drafters
import drafting
import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, run_schedule, schedules
from test_real_schedules import VOCAB, alone, check, make_core, with_sampling, worker_for

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
    truths = [[*request.prompt, *alone(request).tokens] for request in schedule.requests]
    core, executor = make_core(schedule.settings, buckets, parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters.KnowingBody, "truths", truths)
        patch.setattr(drafters.KnowingBody, "exact", True)
        outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check(request, outcomes[request.request_id])
    assert executor.num_placeholders == 0 or parallel.pp == 1, "the first stage sees no token drawn"
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"swapped: {min(core.stats().num_swap_preemptions, 3)}")
    event(f"jumps: {core.stats().num_accepted_jump_tokens > 0}")
    event(f"under way: {executor.most_in_flight}")
    event(f"{schedule.settings.drafter}: accepted {core.stats().num_accepted_drafts > 0}")


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


@given(schedule=schedules(VOCAB, max_requests=6, drafters=("", "layer")), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_captured_decode_steps(schedule: Schedule, seed: int) -> None:
    """Each stage replays its own, padded to buckets; what travels has the plan's rows."""
    run(schedule, seed, PARALLEL[0], buckets=True)


DRAFTERS = ("ngram", "layer", "model", "copy", *drafting.KINDS)


@pytest.mark.parametrize("parallel", [PARALLEL[1], PARALLEL[3]], ids=str)
@given(schedule=schedules(VOCAB, max_requests=6, drafters=DRAFTERS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_drafts_change_no_token(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    """The last stage proposes them with the step before; each plan brings its own."""
    run(schedule, seed, parallel)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
@given(schedule=st.booleans().flatmap(lambda crowded: schedules(VOCAB, crowded=crowded)), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)


@pytest.mark.parametrize("parallel", [PARALLEL[0], PARALLEL[2]], ids=str)
def test_every_stage_has_a_plan_at_work_while_the_others_have_theirs(parallel: Parallel) -> None:
    """Counted: at one moment n stages compute n plans, each of a part of the decodes, one behind the other."""
    stages = parallel.pp
    settings = Settings(
        num_pages=200, max_num_seqs=2 * stages, max_num_batched_tokens=64, max_model_len=40, in_flight=stages + 1,
        enable_prefix_caching=False, hold=False,
    )  # fmt: skip
    like = replace(settings, in_flight=1, num_drafts=0, adaptive=True)
    crew: Any = worker_for(like, False, parallel, False)[0]  # as `make_core` asks for it: kept by what it is asked
    rows: dict[int, int] = {}
    current: dict[int, int] = {}
    at_work: list[dict[int, int]] = []
    first, last = 6, 18  # rounds in which all requests decode, and none has ended
    together = threading.Barrier(stages, lambda: at_work.append(dict(current)))

    def work(stage: int, plan: Any) -> Any:
        rows[plan.step_id] = plan.num_rows
        if first <= plan.step_id + stage < last:  # in a round stage s has the plan before that of stage s - 1
            current[stage] = plan.step_id
            together.wait(20)
        return type(crew.workers[stage]).execute(crew.workers[stage], plan)

    with pytest.MonkeyPatch.context() as patch:
        for stage, worker in enumerate(crew.workers):
            patch.setattr(worker, "execute", partial(work, stage), raising=False)
        core, _ = make_core(settings, parallel=parallel)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, seed=0)
        requests = tuple(Planned(request_id=f"r{i}", prompt=(i + 1, 2), params=params) for i in range(2 * stages))
        outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    assert at_work == [{stage: step - stage for stage in range(stages)} for step in range(first, last)]
    assert {rows[step] for step in range(first, last - stages)} == {2}, "each plan has its part of those that decode"
    for request in requests:
        check(request, outcomes[request.request_id])
