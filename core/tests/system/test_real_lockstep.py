"""Engine cores in lockstep with the real runner in float64, cores and ranks as threads: whatever the others compute,
each request gets the tokens that it gets alone, and all cores exchange tokens of the sizes that they agreed on."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import pytest
import torch
from harness import VOCAB, layout
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from lockstep_cores import run_together
from schedules import Schedule, Settings, schedules
from test_real_schedules import Crew, check, core_around, message_for, unvaried, with_sampling

from engine.distributed.group import ProcessGroup
from engine.runner.model_runner import ModelRunner
from engine.types.parallel import Parallel
from engine.types.start import WorkerReady


class Exchanged:
    """A model whose hidden states all cores gather and give back, as layers of dealt experts do."""

    def __init__(self, model: Any, group: ProcessGroup) -> None:
        self._model = model
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, state: Any, walk: Any) -> Any:
        hidden, group = self._model.forward(state, walk), self._group
        if hidden is None:  # a stage that is not the last
            return None
        own, sizes = len(hidden), group.tokens or [len(hidden)] * group.size
        assert own <= sizes[group.rank]
        padding = hidden.new_zeros(sizes[group.rank] - own, hidden.shape[1])
        every = group.all_gather(torch.cat((hidden, padding)), 0, sizes)
        start = sum(sizes[: group.rank])
        return every[start : start + own].clone()


@lru_cache(maxsize=16)
def crews(settings: Settings, buckets: bool, parallel: Parallel) -> list[tuple[Crew, WorkerReady]]:
    """The workers of each core, started together."""
    message = message_for(settings, buckets, parallel)
    message = msgspec.structs.replace(message, meeting=tempfile.mkdtemp(prefix="lockstep-"))
    starts = [msgspec.structs.replace(message, data_parallel_rank=rank) for rank in range(parallel.dp)]
    made = [Crew(start) for start in starts]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(parallel.dp) as pool:
        whole = ModelRunner.__init__

        def init(self: Any, start: Any, built: Any, *args: Any, **named: Any) -> None:
            built = replace(built, model=Exchanged(built.model, built.groups["dp"]))
            whole(self, start, built, *args, **named)

        patch.setattr(ModelRunner, "__init__", init)
        return list(zip(made, pool.map(Crew.begun, made), strict=True))


def run(several: list[Schedule], seed: int, parallel: Parallel, buckets: bool) -> None:
    settings = several[0].settings
    several = [
        with_sampling(replace(one, settings=replace(settings, in_flight=one.settings.in_flight)), seed + number)
        for number, one in enumerate(several)
    ]
    workers = crews(unvaried(settings), buckets, parallel)
    form = layout().marked() if settings.canary else layout()

    def make(rank: int, schedule: Schedule) -> Any:
        return core_around(*workers[rank], form, schedule.settings, parallel.pp)[0]

    cores = run_together(several, make, lambda core, request, outcome: check(request, outcome))
    event(f"preemptions: {any(core.stats().num_preemptions for core in cores)}")


def of(size: int, most: int, **how: Any) -> st.SearchStrategy[list[Schedule]]:
    return st.lists(schedules(VOCAB, max_requests=most, **how), min_size=size, max_size=size)


TWO = st.booleans().flatmap(lambda crowded: of(2, 4, crowded=crowded))
WITH_DRAFTS = of(2, 4, drafters=("ngram",))
CASES = [
    pytest.param(Parallel(dp=2), False, WITH_DRAFTS, id="dp 2, drafts"),
    pytest.param(Parallel(dp=2), True, TWO, id="dp 2, replayed"),
    pytest.param(Parallel(dp=2, tp=2), False, TWO, id="dp 2, tp 2"),
]


@pytest.mark.parametrize(("parallel", "buckets", "several"), CASES)
@given(data=st.data(), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(
    parallel: Parallel, buckets: bool, several: st.SearchStrategy[list[Schedule]], data: st.DataObject, seed: int
) -> None:
    run(data.draw(several), seed, parallel, buckets)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("parallel", [Parallel(dp=3), Parallel(dp=2, tp=2), Parallel(dp=2, pp=2)], ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(parallel: Parallel, buckets: bool, data: st.DataObject, seed: int) -> None:
    drafters = ("",) if parallel.pp > 1 else ("", "ngram")
    how = {"crowded": data.draw(st.booleans()), "drafters": drafters}
    run(data.draw(of(parallel.dp, 6, **how)), seed, parallel, buckets)
