"""A worker that computes nothing: every token is there at once. What remains is the engine's own work."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from engine.types.plan import StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart

TOKEN = 7
"""What every row draws."""


class NullWorker:
    """Implements `engine.interfaces.executor.Worker` without a model or a device.

    Of a row's drafts it accepts none, one, ... or all, in turn from step to step.
    """

    def __init__(self, message: WorkerStart) -> None:
        assert message.num_kv_pages is not None
        self._num_pages = message.num_kv_pages
        self._num_drafts: np.ndarray | None = None

    def start(self) -> WorkerReady:
        """The pages are those of the start message; they stand for no memory."""
        return WorkerReady(num_pages=self._num_pages, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0.0)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Done when it returns."""
        self._num_drafts = plan.num_drafts
        done: Future[StepResult] = Future()
        done.set_result(
            StepResult(
                step_id=plan.step_id,
                tokens=self.one_each(plan) if plan.num_drafts is None else _with_drafts(plan, plan.num_drafts),
                num_drafts=plan.num_drafts,
            )
        )
        return done

    def drafts(self, step_id: int) -> list[list[int]]:
        """As many of the one token as each row of the last step has."""
        return [] if self._num_drafts is None else [[TOKEN] * count for count in self._num_drafts.tolist()]

    def one_each(self, plan: StepPlan) -> np.ndarray:
        """int32 [R]: what the rows draw; -1 where a row draws nothing."""
        return np.where(plan.samples, np.int32(TOKEN), np.int32(-1))

    def shutdown(self) -> None:
        """Nothing to free."""


def _with_drafts(plan: StepPlan, num_drafts: np.ndarray) -> np.ndarray:
    """int32 [R, 1 + k]."""
    drawn = plan.samples * (1 + (plan.step_id + plan.slot_of_row) % (num_drafts + 1))
    return np.where(np.arange(1 + num_drafts.max()) < drawn[:, None], np.int32(TOKEN), np.int32(-1))
