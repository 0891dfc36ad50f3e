"""Experts dealt over the ranks of several engine cores, which step together, under the schedules of the core's own
tests, in float64: each request gets exactly the tokens that it gets alone from one rank, also while experts move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import real_lockstep
from dealt_harness import each_way
from harness import VOCAB
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, examples
from test_dealt_schedules import moved

from engine.types.parallel import Parallel
from engine.types.params import SamplingParams

QUICK = ("two cores", "two cores of two ranks, moving")


@pytest.fixture(scope="module", autouse=True)
def _forgotten(way: Parallel) -> Iterator[None]:
    """Workers are of the way in which they were made."""
    real_lockstep.crews.cache_clear()
    yield
    real_lockstep.crews.cache_clear()


def of_cores(parallel: Parallel, most: int, crowded: bool = False) -> st.SearchStrategy[list[Schedule]]:
    return real_lockstep.of(parallel.dp, most, crowded=crowded, drafters=("",) if parallel.pp > 1 else ("", "ngram"))


@each_way(*QUICK, cores=True)
@given(data=st.data(), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(2), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(way: Parallel, data: st.DataObject, seed: int) -> None:
    real_lockstep.run(data.draw(of_cores(way, 4)), seed, way)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [False, True], ids=["eager", "replayed"])
@each_way(cores=True)
@given(data=st.data(), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(way: Parallel, buckets: bool, data: st.DataObject, seed: int) -> None:
    crowded = data.draw(st.booleans())
    real_lockstep.run(data.draw(of_cores(way, 6, crowded)), seed, way, buckets)


@pytest.mark.parametrize("way", ["two cores of two ranks, moving"], indirect=True)
def test_experts_move_while_cores_step_together(way: Parallel) -> None:
    settings = Settings(
        num_pages=26, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=1,
        enable_prefix_caching=True,
    )  # fmt: skip
    several = [
        Schedule(
            settings=settings,
            requests=tuple(
                Planned(
                    request_id=f"c{core}r{i}",
                    prompt=tuple((7 * i + j + core) % VOCAB for j in range(3 + i)),
                    params=SamplingParams(max_tokens=21, ignore_eos=True),
                    arrives=i // 3,
                )
                for i in range(5)
            ),
        )
        for core in range(way.dp)
    ]
    real_lockstep.crews.cache_clear()  # workers that have moved nothing
    cores = real_lockstep.run(several, 0, way)
    assert all(moved(core) > 0 for core in cores), "nothing moved on a core"
