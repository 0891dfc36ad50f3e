"""Engine cores in lockstep with the real runner, cores and ranks as threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import pytest
from harness import VOCAB
from hypothesis import strategies as st
from lockstep_cores import run_together
from schedules import Schedule, Settings, schedules
from test_real_schedules import Crew, check, core_around, laid_out, message_for, unvaried, with_sampling

from engine.loop.engine_core import EngineCore
from engine.runner.model_runner import ModelRunner
from engine.types.parallel import Parallel
from engine.types.start import WorkerReady


@lru_cache(maxsize=16)
def crews(
    settings: Settings, buckets: bool, parallel: Parallel, changed: Callable[[Any], Any] | None = None
) -> list[tuple[Crew, WorkerReady]]:
    """The workers of each core, started together. changed: makes what a worker computes with of what it would."""
    message = message_for(settings, buckets, parallel)
    message = msgspec.structs.replace(message, meeting=tempfile.mkdtemp(prefix="lockstep-"))
    starts = [msgspec.structs.replace(message, data_parallel_rank=rank) for rank in range(parallel.dp)]
    made = [Crew(start) for start in starts]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(parallel.dp) as pool:
        whole = ModelRunner.__init__

        def init(self: Any, start: Any, built: Any, *args: Any, **named: Any) -> None:
            whole(self, start, built if changed is None else changed(built), *args, **named)

        patch.setattr(ModelRunner, "__init__", init)
        return list(zip(made, pool.map(Crew.begun, made), strict=True))


def run(
    several: list[Schedule],
    seed: int,
    parallel: Parallel,
    buckets: bool = False,
    changed: Callable[[Any], Any] | None = None,
) -> list[EngineCore]:
    """The cores, when each request has got what it gets alone."""
    settings = several[0].settings
    several = [
        with_sampling(replace(one, settings=replace(settings, in_flight=one.settings.in_flight)), seed + number)
        for number, one in enumerate(several)
    ]
    workers = crews(unvaried(settings), buckets, parallel, changed)
    form = laid_out(settings.drafter, parallel)
    form = form.marked() if settings.canary else form

    def make(rank: int, schedule: Schedule) -> Any:
        return core_around(*workers[rank], form, schedule.settings, parallel.pp)[0]

    return run_together(several, make, lambda core, request, outcome: check(request, outcome))


def of(size: int, most: int, **how: Any) -> st.SearchStrategy[list[Schedule]]:
    """A schedule for each core."""
    return st.lists(schedules(VOCAB, max_requests=most, **how), min_size=size, max_size=size)
