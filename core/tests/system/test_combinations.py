"""Every way to divide a model over up to eight ranks, as threads with the real runner in float64: under any schedule
each request gets the tokens that it gets alone from one worker. Drafts, constraints, prefix hits, preemption, swapping
and log probabilities of prompts are among what schedules bring."""

from __future__ import annotations

from collections.abc import Iterator

import drafters
import harness
import pytest
import test_real_schedules as real
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Schedule, examples, schedules
from test_real_schedules import VOCAB
from test_stages import run
from thread_ranks import ThreadExecutor

from engine.types.parallel import Parallel

WINDOW = 6
"""Of the sliding layers: two and three ranks that share sequences can share it."""
COMBINATIONS = (
    *(Parallel(tp=tp, pp=pp, cp=cp) for cp in (1, 2) for pp in (1, 2) for tp in (1, 2) if tp * pp * cp > 1),
    Parallel(cp=3),
)
QUICK = (Parallel(cp=2), Parallel(cp=2, tp=2))
"""Those without shared sequences run in `test_stages.py` and `test_tokens.py` too."""
DRAFTERS = ("", "ngram", "layer", "model", "copy", "mixed")


@pytest.fixture(scope="module", autouse=True)
def _windows() -> Iterator[None]:
    """What was made before has other windows, and so has what is made afterwards."""

    def forget() -> None:
        real.worker_for.cache_clear()
        real.ALONE.clear()

    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setattr(harness, "WINDOW", WINDOW)
        for config in (harness.CONFIG, *drafters.MODELS.values()):
            patch.setitem(config, "sliding_window", WINDOW)
        yield
        forget()
    for crew in list(ThreadExecutor.started):
        crew.shutdown()


@pytest.mark.parametrize(
    "parallel", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in COMBINATIONS], ids=str
)
@given(schedule=schedules(VOCAB, max_requests=5, drafters=DRAFTERS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)


@given(schedule=schedules(VOCAB, max_requests=5, crowded=True), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
def test_shared_sequences_in_a_crowded_cache(schedule: Schedule, seed: int) -> None:
    run(schedule, seed, QUICK[0])


@given(schedule=schedules(VOCAB, max_requests=5), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
def test_captured_steps_of_shared_sequences(schedule: Schedule, seed: int) -> None:
    run(schedule, seed, QUICK[0], buckets=True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", COMBINATIONS, ids=str)
@given(
    schedule=st.booleans().flatmap(lambda crowded: schedules(VOCAB, drafters=DRAFTERS, crowded=crowded)),
    seed=st.integers(0, 2**32),
)
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(parallel: Parallel, schedule: Schedule, seed: int) -> None:
    run(schedule, seed, parallel)
