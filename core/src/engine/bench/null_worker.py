"""A worker that computes nothing: every token is there at once. What remains is the engine's own work."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from engine.types.plan import StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart

TOKEN = 7
"""What every row draws."""


class NullWorker:
    """Implements `engine.interfaces.executor.Worker` without a model or a device."""

    def __init__(self, message: WorkerStart) -> None:
        assert message.num_kv_pages is not None
        self._num_pages = message.num_kv_pages

    def start(self) -> WorkerReady:
        """The pages are those of the start message; they stand for no memory."""
        return WorkerReady(num_pages=self._num_pages, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0.0)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Done when it returns."""
        done: Future[StepResult] = Future()
        tokens = np.where(plan.samples, np.int32(TOKEN), np.int32(-1))
        done.set_result(StepResult(step_id=plan.step_id, tokens=tokens))
        return done

    def shutdown(self) -> None:
        """Nothing to free."""
