"""Steps on their way to a result: launched, waiting for masks, failed, or with transfers around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from engine.interfaces.executor import StepFuture
from engine.interfaces.kv_connector import KVConnectorWorker
from engine.interfaces.platform import Fetch
from engine.runner.drafting import Positions
from engine.runner.prompt_logprobs import ScoredPrompts
from engine.types.plan import ErrorParts, LogprobRows, Masks, PromptLogprobRows, StepPlan, StepResult

_POLL_SECONDS = 0.0001


class RunningStep:
    """A launched step: implements `engine.interfaces.executor.StepFuture`.

    Args:
        plan: of the step.
        rows: int64 [n]; the rows that draw a token.
        fetch: the copy under way of their tokens int32 [n] and, where rows asked for log probabilities, of what
            `Ops.logprobs` gave for them, then of the prompt scores' tensors; None where there is nothing to bring.
        logprob_rows: int32 [m]; the rows that asked.
        prompt_scores: of prompt tokens, where rows asked for them.
        errors: as for `StepResult`.
    """

    def __init__(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        fetch: Fetch | None,
        logprob_rows: np.ndarray | None = None,
        prompt_scores: ScoredPrompts | None = None,
        errors: dict[int, ErrorParts] | None = None,
    ) -> None:
        self._step_id = plan.step_id
        self._num_rows = plan.num_rows
        self._rows = rows
        self._fetch = fetch
        self._logprob_rows = logprob_rows
        self._prompt_scores = prompt_scores
        self._errors = errors
        self._result: StepResult | None = None

    def done(self) -> bool:
        """True once `result` would not block."""
        return self._result is not None or self._fetch is None or self._fetch.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step. Raises TimeoutError after `timeout` seconds."""
        if self._result is None:
            if timeout is not None:
                self._wait(timeout)
            self._result = self._take()
            self._fetch = None
        return self._result

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._step_id} is not done after {timeout} s")
            time.sleep(_POLL_SECONDS)

    def _take(self) -> StepResult:
        tokens = np.full(self._num_rows, -1, np.int32)
        if self._fetch is None:
            return StepResult(step_id=self._step_id, tokens=tokens)
        rest, prompt_logprobs = self._fetched()
        if rest:
            tokens[self._rows] = rest.pop(0)
        logprobs = None
        if self._logprob_rows is not None:
            chosen, rank, top_ids, top_values = rest
            logprobs = LogprobRows(
                row=self._logprob_rows, chosen=chosen, rank=rank, top_ids=top_ids, top_values=top_values
            )
        return StepResult(
            step_id=self._step_id,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=self._errors,
        )

    def _fetched(self) -> tuple[list[np.ndarray], PromptLogprobRows | None]:
        """What the copy brought: everything but the prompt scores, and these."""
        assert self._fetch is not None
        arrays = [tensor.numpy() for tensor in self._fetch.wait()]
        if self._prompt_scores is None:
            return arrays, None
        split = len(arrays) - len(self._prompt_scores.tensors)
        return arrays[:split], self._prompt_scores.rows(arrays[split:])


class DraftedStep(RunningStep):
    """A launched step with drafts.

    Args:
        plan: of the step, cut to the drafts that were found.
        positions: that draw, n of m rows.
        fetch: of the tokens drawn int32 [n], how many of them count for each row int32 [m], log probabilities, and
            the prompt scores' tensors.
        logprob_places: int64; which of the positions asked for log probabilities.
        prompt_scores: of prompt tokens, where rows asked for them.
        errors: as for `StepResult`.
    """

    def __init__(
        self,
        plan: StepPlan,
        positions: Positions,
        fetch: Fetch,
        logprob_places: np.ndarray | None = None,
        prompt_scores: ScoredPrompts | None = None,
        errors: dict[int, ErrorParts] | None = None,
    ) -> None:
        super().__init__(plan, positions.rows, fetch, prompt_scores=prompt_scores, errors=errors)
        self._positions = positions
        self._logprob_places = logprob_places

    def _take(self) -> StepResult:
        (drawn, counts, *rest), prompt_logprobs = self._fetched()
        at = self._positions
        given = np.zeros(self._num_rows, np.int32)
        given[at.rows] = counts
        counted = at.offset < given[at.row]
        tokens = np.full((self._num_rows, 1 + int(at.num_drafts.max())), -1, np.int32)
        tokens[at.row[counted], at.offset[counted]] = drawn[counted]
        logprobs = None
        if self._logprob_places is not None:
            kept = counted[self._logprob_places]
            chosen, rank, top_ids, top_values = (values[kept] for values in rest)
            row = at.row[self._logprob_places][kept].astype(np.int32)
            logprobs = LogprobRows(row=row, chosen=chosen, rank=rank, top_ids=top_ids, top_values=top_values)
        return StepResult(
            step_id=self._step_id,
            tokens=tokens,
            logprobs=logprobs,
            num_drafts=at.num_drafts,
            prompt_logprobs=prompt_logprobs,
            errors=self._errors,
        )


class FailedStep:
    """A step that could not be launched: implements `engine.interfaces.executor.StepFuture`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> StepResult:
        """Raises the error."""
        raise self._error


class PendingSample:
    """Implements `engine.interfaces.executor.StepFuture`: not done until it was sampled.

    Args:
        step_id: of the plan.
        draw: the rest of the step.
        drafts: tells those of each row; see `engine.interfaces.executor.Worker.drafts`.
    """

    def __init__(
        self, step_id: int, draw: Callable[[Masks], StepFuture], drafts: Callable[[], list[list[int]]]
    ) -> None:
        self.step_id = step_id
        self.drafts = drafts
        self._draw = draw
        self._rest: StepFuture | None = None

    def sample(self, masks: Masks) -> None:
        """Launch the rest of the step. An error of that is the future's."""
        try:
            self._rest = self._draw(masks)
        except Exception as error:
            self._rest = FailedStep(error)

    def done(self) -> bool:
        """True once `result` would not block."""
        return self._rest is not None and self._rest.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step. Raises TimeoutError after `timeout` seconds.

        Raises RuntimeError where the masks have not come: whoever waits here is who would have to bring them.
        """
        if self._rest is None:
            raise RuntimeError(f"step {self.step_id} waits for its masks: call sample first")
        return self._rest.result(timeout)


class Transfers:
    """Runs the transfers of each plan before the plan's own work.

    Args:
        connectors: by driver, bound to the pool.
    """

    def __init__(self, connectors: Mapping[str, KVConnectorWorker]) -> None:
        self._connectors = dict(connectors)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, execute: Callable[[StepPlan], StepFuture]) -> StepFuture:
        """Launch a plan that has metadata for connectors. An error of a transfer is the future's.

        execute: launches the step itself.
        """
        metadata = plan.sections
        assert metadata is not None
        try:
            for name, content in metadata.items():
                self._connectors[name].save(content)
            for name, content in metadata.items():
                self._connectors[name].start_load(plan.step_id, content)
        except Exception as error:
            return FailedStep(error)
        return TransferStep(execute(plan), plan.step_id, [self._connectors[name] for name in metadata])


class TransferStep:
    """A step with transfers: implements `engine.interfaces.executor.StepFuture`.

    Args:
        inner: the step's own future.
        step_id: of the plan.
        connectors: those that had something to do.
    """

    def __init__(self, inner: StepFuture, step_id: int, connectors: list[KVConnectorWorker]) -> None:
        self._inner = inner
        self._step_id = step_id
        self._connectors = connectors
        self._result: StepResult | None = None

    def done(self) -> bool:
        """True once `result` would not block."""
        return self._inner.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """The step's result, with the pages that could not be filled. Raises TimeoutError after `timeout` seconds."""
        if self._result is None:
            result = self._inner.result(timeout)
            failed = np.concatenate([c.step_result(self._step_id).failed_pages for c in self._connectors])
            self._result = msgspec.structs.replace(result, failed_pages=failed) if failed.size else result
        return self._result
