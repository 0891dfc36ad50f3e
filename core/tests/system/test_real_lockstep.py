"""Engine cores in lockstep with the real runner in float64, cores and ranks as threads: whatever the others compute,
each request gets the tokens that it gets alone, and all cores exchange tokens of the sizes that they agreed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from real_lockstep import of, run
from schedules import Schedule

from engine.distributed.group import ProcessGroup
from engine.types.parallel import Parallel


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


def exchanged(built: Any) -> Any:
    return replace(built, model=Exchanged(built.model, built.groups["dp"]))


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
    run(data.draw(several), seed, parallel, buckets, exchanged)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("parallel", [Parallel(dp=3), Parallel(dp=2, tp=2), Parallel(dp=2, pp=2)], ids=str)
@given(data=st.data(), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(parallel: Parallel, buckets: bool, data: st.DataObject, seed: int) -> None:
    drafters = ("",) if parallel.pp > 1 else ("", "ngram")
    how = {"crowded": data.draw(st.booleans()), "drafters": drafters}
    run(data.draw(of(parallel.dp, 6, **how)), seed, parallel, buckets, exchanged)
