"""An executor that runs any number of workers on the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.interfaces.executor import rank_starts
from engine.plugin.loading import import_object
from engine.types.errors import EngineDeadError
from engine_kit.ranks import call_worker, merge_ready

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.types.plan import Masks, StepPlan
    from engine.types.start import WorkerReady, WorkerStart


class AllRanks:
    """A step on every rank: done when all are, and the result is rank 0's."""

    def __init__(self, futures: Sequence[Any]) -> None:
        self.futures = futures

    def done(self) -> bool:
        """Of all."""
        return all(future.done() for future in self.futures)

    def result(self, timeout: float | None = None) -> Any:
        """Rank 0's, or the first error."""
        first, *_ = [future.result(timeout) for future in self.futures]
        return first


class Plain:
    """See `engine.interfaces.executor.Executor`."""

    def __init__(self, context: CoreContext) -> None:
        self._class: Any = import_object(context.worker)
        self._workers: list[Any] | None = None

    def start(self, message: WorkerStart) -> WorkerReady:
        """One rank after the other."""
        self._workers = [self._class(one) for one in rank_starts(message)]
        return merge_ready([worker.start() for worker in self._workers])

    def execute(self, plan: StepPlan) -> Any:
        """On every rank."""
        return AllRanks([worker.execute(plan) for worker in self._living()])

    def sample(self, step_id: int, masks: Masks) -> None:
        """On every rank."""
        for worker in self._living():
            worker.sample(step_id, masks)

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        """On every rank, or on one."""
        asked = [worker for place, worker in enumerate(self._living()) if rank in (None, place)]
        return [call_worker(worker, method, args) for worker in asked]

    def check_health(self) -> None:
        """They live as long as the caller."""
        self._living()

    def shutdown(self) -> None:
        """Let go of them."""
        self._workers = None

    def _living(self) -> list[Any]:
        if self._workers is None:
            raise EngineDeadError("reach the workers", "they were shut down")
        return self._workers
