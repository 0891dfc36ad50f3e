"""Executor `inline`: one worker on the caller's thread.

A step's call returns when its work is launched; on a host device it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.interfaces.executor import ExecutorCard, ExecutorNeed
from engine.plugin.loading import import_object
from engine.types.errors import EngineDeadError
from engine_kit.ranks import call_worker

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.interfaces.executor import StepFuture, Worker
    from engine.types.plan import Masks, StepPlan
    from engine.types.start import WorkerReady, WorkerStart


class InlineExecutor(ExecutorCard):
    """Runs one worker on the caller's thread: no other process, nothing to encode."""

    body = "engine_reference.executor_inline:Inline"

    @classmethod
    def unsupported(cls, need: ExecutorNeed) -> list[str]:
        """One worker is all it can start."""
        if need.parallel.world != 1:
            return [f"it runs one worker, {need.parallel.world} are needed"]
        return []


class Inline:
    """Carries plans to a worker by calling it; see `engine.interfaces.executor.Executor`."""

    def __init__(self, context: CoreContext) -> None:
        self._worker_class = context.worker
        self._worker: Worker | None = None

    def start(self, message: WorkerStart) -> WorkerReady:
        self._worker = import_object(self._worker_class)(message)
        try:
            return self._worker.start()
        except BaseException:
            self.shutdown()  # a half-loaded model would keep its memory as long as the error is kept
            raise

    def execute(self, plan: StepPlan) -> StepFuture:
        return self._living().execute(plan)

    def sample(self, step_id: int, masks: Masks) -> None:
        self._living().sample(step_id, masks)

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        return [call_worker(self._living(), method, args)]

    def check_health(self) -> None:
        """A worker on the caller's thread lives as long as the caller, until it is shut down."""
        self._living()

    def shutdown(self) -> None:
        worker = self._worker
        self._worker = None
        if worker is not None:
            worker.shutdown()

    def _living(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("reach the worker", "it was not started, or was shut down", "start a new engine")
        return self._worker
