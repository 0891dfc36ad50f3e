"""Point `executor`: starts workers, carries plans to them, merges their results, reports their death."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from engine.plugin import Card
from engine.plugin.hook_calls import sum_failures
from engine.types.errors import ContractError
from engine.types.kv import KVLayout
from engine.types.parallel import Parallel, Place, places
from engine.types.plan import StepResult
from engine.types.start import WorkerReady, WorkerStart

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.types.plan import Masks, StepPlan


@dataclass(frozen=True, kw_only=True)
class ExecutorNeed:
    """What the engine asks of an executor.

    Args:
        parallel: over how many workers the model is divided.
    """

    parallel: Parallel = field(default_factory=Parallel)


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
        """Start a worker for each of `rank_starts`; return when they are ready. The answer is `merge_ready`'s.

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

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        """Call a method of every worker, or of one rank's alone: an answer of each that was asked, of plain data. It
        follows the steps that were started, also one that still waits for its masks."""
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
        """Launch a step and return; the future's `result` waits for it. See `Executor.execute`.

        A worker whose place does not draw has no tokens to tell: its result has -1 for each row. See `StepMerge`.
        """
        ...

    def sample(self, step_id: int, masks: Masks) -> None:
        """See `Executor.sample`. A worker that does not draw has nothing to do."""
        ...

    def drafts(self, step_id: int) -> list[list[int]]:
        """The drafts of each row of the last step, which waits for its masks; [] for a row without any. A worker that
        does not draw answers [].

        Asked where constrained rows have some, through `Executor.call`. Waits for the drafter, not for the forward
        pass. Raises the error with which the step could not be launched.
        """
        ...

    def shutdown(self) -> None:
        """Free memory. Idempotent."""
        ...


# -- for every executor of several workers: their start messages, and one answer made of theirs -----------------------
def rank_starts(message: WorkerStart) -> list[WorkerStart]:
    """The start message of each rank: its place, and of the KV cache what its layers keep.

    Raises ConfigError where the model has too few layers for its stages.
    """
    return [
        msgspec.structs.replace(message, place=place, layout=_on_stage(message, place))
        for place in places(message.parallel, message.model.num_layers)
    ]


def _on_stage(message: WorkerStart, place: Place) -> KVLayout:
    """The same blocks and tokens for the layers of a stage alone."""
    if place.stage.count == 1:
        return message.layout
    mine = frozenset(place.stage.layers(message.model.num_layers))
    return message.layout.on_stage([site for site, spec in enumerate(message.model.sites) if spec.layer in mine])


def merge_ready(answers: Sequence[WorkerReady]) -> WorkerReady:
    """What the ranks of one engine core answer as one answer: see `WorkerReady`."""
    step_bytes = [answer.step_bytes for answer in answers if answer.step_bytes is not None]
    reasons = [reason for answer in answers for reason in answer.not_captured or ()]
    return WorkerReady(
        num_pages=min(answer.num_pages for answer in answers),
        weight_bytes=sum(answer.weight_bytes for answer in answers),
        cache_bytes=sum(answer.cache_bytes for answer in answers),
        num_parameters=sum(answer.num_parameters for answer in answers),
        load_seconds=max(answer.load_seconds for answer in answers),
        step_bytes=sum(step_bytes) if len(step_bytes) == len(answers) else None,
        captured=min((answer.captured for answer in answers), key=len),
        not_captured=tuple(dict.fromkeys(reasons)) if answers[0].not_captured is not None else None,
        broken=tuple(dict.fromkeys(plugin for answer in answers for plugin in answer.broken)),
        hook_failures=sum_failures(answer.hook_failures for answer in answers),
    )


class RankAnswer(msgspec.Struct, kw_only=True):
    """What a rank says of a step to whoever merges the answers.

    Args:
        step_id: of the plan.
        checksum: CRC-32 of the tokens that it drew; None: it draws nothing.
        result: of the first rank that draws; None of all others.
        failed_pages: int32; pages that a connector could not fill on this rank; None for none.
    """

    step_id: int
    checksum: int | None = None
    result: StepResult | None = None
    failed_pages: np.ndarray | None = None

    @classmethod
    def of(cls, place: Place, result: StepResult) -> RankAnswer:
        """What the worker at a place gave."""
        if not place.draws:
            return cls(step_id=result.step_id, failed_pages=result.failed_pages)
        return cls(
            step_id=result.step_id,
            checksum=zlib.crc32(result.tokens.tobytes()),
            result=result if place.tp_rank == 0 else None,
            failed_pages=result.failed_pages,
        )


class StepMerge:
    """One step's result, made of all ranks' answers.

    Ranks of the last stage draw each for itself, from logits that are equal bit by bit and with random numbers that
    depend on nothing but the request: drawn tokens stand in every rank's table for the next step without another
    exchange, and the checksum proves it. The other stages draw nothing; the next plan brings them the tokens.

    Args:
        step_id: of the plan.
        ranks: all that answer.
    """

    def __init__(self, step_id: int, ranks: Iterable[int]) -> None:
        self._step_id = step_id
        self._waiting = set(ranks)
        self._checksums: set[int] = set()
        self._result: StepResult | None = None
        self._failed_pages: list[np.ndarray] = []

    @property
    def complete(self) -> bool:
        """Every rank has answered."""
        return not self._waiting

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return sorted(self._waiting)

    def take(self, rank: int, answer: RankAnswer) -> None:
        """A rank's answer.

        Raises ContractError where it drew other tokens than a rank before it, or all have answered and none with a
        result.
        """
        self._waiting.discard(rank)
        if answer.checksum is not None:
            self._checksums.add(answer.checksum)
        if answer.failed_pages is not None and answer.failed_pages.size:
            self._failed_pages.append(answer.failed_pages)
        if answer.result is not None:
            self._result = answer.result
        if len(self._checksums) > 1:
            found = f"rank {rank} drew other tokens than the ranks that answered before it"
            remedy = "ranks must compute alike: use equal devices, and the same versions of every distribution"
        elif self.complete and self._result is None:
            found, remedy = "no rank answered with a result", "choose another executor and tell its author"
        else:
            return
        raise ContractError(f"compute step {self._step_id}", found, remedy, point="executor")

    def result(self) -> StepResult:
        """The step's result, once it is complete. What one rank misses, the request has to compute again on all."""
        assert self._result is not None and self.complete
        if not self._failed_pages:
            return self._result
        return msgspec.structs.replace(self._result, failed_pages=np.unique(np.concatenate(self._failed_pages)))
