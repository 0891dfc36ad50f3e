"""Point `executor`: starts workers, carries plans to them, merges their results, reports their death."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from engine.plugin import Card
from engine.types.kv import KVLayout
from engine.types.parallel import Parallel, Place, places

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.types.plan import Masks, StepPlan, StepResult
    from engine.types.start import WorkerReady, WorkerStart


@dataclass(frozen=True, kw_only=True)
class ExecutorNeed:
    """What the engine asks of an executor.

    Args:
        parallel: over how many workers the model is divided.
    """

    parallel: Parallel = field(default_factory=Parallel)


class ExecutorCard(Card):
    """Describes an executor."""

    nodes: ClassVar[str] = ""
    """The driver of point nodes that comes with it, where the user names none."""
    apart: ClassVar[bool] = False
    """Whether its workers are processes of their own, which it starts by `CoreContext.nodes` where that is given."""


class StepFuture(Protocol):
    """A step under way. `concurrent.futures.Future` has this form."""

    def done(self) -> bool:
        """True once `result` would not block."""

    def result(self, timeout: float | None = None) -> StepResult:
        """The result, or the error that ended the step. Raises TimeoutError."""


class Executor(Protocol):
    """Workers at work. Built with a `CoreContext`, whose `worker` names the class to start."""

    def __init__(self, context: CoreContext) -> None: ...

    def start(self, message: WorkerStart) -> WorkerReady:
        """Start a worker for each of `rank_starts`; return when they are ready, with one answer for all
        (`engine_kit.ranks.merge_ready`).

        Raises the worker's own EngineError, or EngineDeadError for a worker that died.
        """

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a step. Steps run in the order of the calls; the arrays of the plan must not be changed afterwards.

        With `plan.masks_follow` the forward pass starts, and the future stays open until `sample` brings the masks.
        """

    def sample(self, step_id: int, masks: Masks) -> None:
        """Let the last step draw, under these masks: called once for each step with `masks_follow`, before the next
        `execute`. Returns at once; an error is the step's future's."""

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        """Call a method of every worker, or of one rank's alone: an answer of each that was asked, of plain data. It
        follows the steps that were started, also one that still waits for its masks. One whose workers are not on the
        caller's thread has `ask(method, *args)` too (minor 3), which waits for nothing and returns `Answers`.

        Raises ConfigError where it has no such method (`engine_kit.ranks.call_worker`), or the method's own error."""

    def check_health(self) -> None:
        """Raise EngineDeadError where a worker has died."""

    def shutdown(self) -> None:
        """Stop the workers and free what they hold. Idempotent."""


class Worker(Protocol):
    """What executors start, one a rank. Named in `CoreContext.worker`."""

    def __init__(self, message: WorkerStart) -> None: ...

    def start(self) -> WorkerReady:
        """Load the model, allocate the pool."""

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step and return; the future's `result` waits for it. See `Executor.execute`.

        A worker whose place does not draw has no tokens to tell: its result has -1 for each row.
        """

    def sample(self, step_id: int, masks: Masks) -> None:
        """See `Executor.sample`. A worker that does not draw has nothing to do."""

    def drafts(self, step_id: int) -> list[list[int]]:
        """The drafts of each row of the last step, which waits for its masks; [] for a row without any. A worker that
        does not draw answers [].

        Asked where constrained rows have some, through `Executor.call`. Waits for the drafter, not for the forward
        pass. Raises the error with which the step could not be launched.
        """

    def shutdown(self) -> None:
        """Free memory. Idempotent."""


def rank_starts(message: WorkerStart) -> list[WorkerStart]:
    """The start message of each rank: its place, and of the KV cache what its layers keep.

    Raises ConfigError where the model has too few layers for its stages.
    """
    return [
        msgspec.structs.replace(
            message, place=place, layout=_on_stage(message, place), drafts=message.drafts if place.draws else ()
        )
        for place in places(message.parallel, message.model.num_layers, message.dp_rank, message.meeting)
    ]


def _on_stage(message: WorkerStart, place: Place) -> KVLayout:
    """The same blocks and tokens for the layers of a stage alone. The last one has those of draft models."""
    if place.stage.count == 1:
        return message.layout
    mine = frozenset(place.stage.layers(message.model.num_layers))
    sites = enumerate(message.sites)
    return message.layout.on_stage(
        [site for site, spec in sites if (place.draws if spec.model else spec.layer in mine)]
    )
