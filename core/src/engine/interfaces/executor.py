"""Point `executor`: starts workers, carries plans to them, merges their results, reports their death."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.plugin import Card
from engine.types.start import WorkerReady, WorkerStart

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.types.plan import Masks, StepPlan, StepResult


@dataclass(frozen=True, kw_only=True)
class ExecutorNeed:
    """What the engine asks of an executor.

    Args:
        world_size: workers.
    """

    world_size: int = 1


class ExecutorCard(Card):
    """Describes an executor."""


class StepFuture(Protocol):
    """A step under way. `concurrent.futures.Future` has this form."""

    def done(self) -> bool:
        """True once `result` would not block."""
        ...

    def result(self, timeout: float | None = None) -> StepResult:
        """The result, or the error that ended the step. Raises TimeoutError."""
        ...


class Executor(Protocol):
    """Workers at work. Built with a `CoreContext`, whose `worker` names the class to start."""

    def __init__(self, context: CoreContext) -> None: ...

    def start(self, message: WorkerStart) -> WorkerReady:
        """Start the workers; return when they are ready. The answer's `num_pages` is the smallest of all ranks.

        Raises the worker's own EngineError, or EngineDeadError for a worker that died.
        """
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a step. Steps run in the order of the calls; the arrays of the plan must not be changed afterwards.

        With `plan.masks_follow` the forward pass starts, and the future stays open until `sample` brings the masks.
        """
        ...

    def sample(self, step_id: int, masks: Masks) -> None:
        """Let the last step draw, under these masks: called once for each step with `masks_follow`, before the next
        `execute`. Returns at once; an error is the step's future's."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; one answer a rank, of plain data. It follows the steps that were started, also
        one that still waits for its masks."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError where a worker has died."""
        ...

    def shutdown(self) -> None:
        """Stop the workers and free what they hold. Idempotent."""
        ...


class Worker(Protocol):
    """What executors start, one a rank. Named in `CoreContext.worker`."""

    def __init__(self, message: WorkerStart) -> None: ...

    def start(self) -> WorkerReady:
        """Load the model, allocate the pool."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step and return; the future's `result` waits for it. See `Executor.execute`."""
        ...

    def sample(self, step_id: int, masks: Masks) -> None:
        """See `Executor.sample`."""
        ...

    def drafts(self, step_id: int) -> list[list[int]]:
        """The drafts of each row of the last step, which waits for its masks; [] for a row without any.

        Asked where constrained rows have some, through `Executor.call`. Waits for the drafter, not for the forward
        pass. Raises the error with which the step could not be launched.
        """
        ...

    def shutdown(self) -> None:
        """Free memory. Idempotent."""
        ...
