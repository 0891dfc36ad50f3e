"""Single steps of a scheduler without a worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cores import LAYOUTS, make_core
from schedules import Settings

from engine.scheduling.scheduler import Scheduler
from engine.types.kv import KVLayout
from engine.types.outputs import CoreOutput
from engine.types.params import SamplingParams
from engine.types.plan import StepPlan, StepResult
from engine.types.request import EngineRequest

SETTINGS = Settings(
    num_pages=100, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, in_flight=2, enable_prefix_caching=True
)


def make_scheduler(layout: KVLayout = LAYOUTS["full"], **changes: Any) -> Scheduler:
    return make_core(layout, dataclasses.replace(SETTINGS, **changes))[0].scheduler


def request(request_id: str, prompt: int | list[int] = 5, **changes: Any) -> EngineRequest:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    outer = {name: changes.pop(name) for name in ("parent", "cache_salt", "eos_token_ids") if name in changes}
    params = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 8, **changes})
    return EngineRequest(request_id=request_id, prompt_token_ids=ids, params=params, **outer)


def plan(scheduler: Scheduler) -> StepPlan:
    made = scheduler.schedule()
    assert made is not None
    return made


def finish(scheduler: Scheduler, token: int = 7) -> list[CoreOutput]:
    """The oldest outstanding plan comes back, each sampled row with `token`."""
    made = scheduler.outstanding[0]
    tokens = np.where(made.samples, token, -1).astype(np.int32)
    outputs = scheduler.update(StepResult(step_id=made.step_id, tokens=tokens))
    scheduler.check_integrity()
    return outputs


def rows(made: StepPlan) -> list[tuple[int, int, int, bool]]:
    columns = (made.slot_of_row, made.num_computed, made.num_tokens, made.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def run(scheduler: Scheduler) -> list[CoreOutput]:
    """Go on until all requests have ended, one step after another."""
    outputs = scheduler.take_notices()
    while scheduler.has_work:
        if scheduler.schedule() is not None or scheduler.outstanding:
            outputs += finish(scheduler)
        outputs += scheduler.take_notices()
    return outputs
