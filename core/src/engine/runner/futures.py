"""Steps under way."""

from __future__ import annotations

import time

import numpy as np

from engine.interfaces.platform import Fetch
from engine.runner.drafting import Positions
from engine.runner.prompt_logprobs import PromptScores
from engine.types.plan import LogprobRows, PromptLogprobRows, StepPlan, StepResult

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
    """

    def __init__(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        fetch: Fetch | None,
        logprob_rows: np.ndarray | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        self._step_id, self._num_rows = plan.step_id, plan.num_rows
        self._rows, self._fetch, self._logprob_rows = rows, fetch, logprob_rows
        self._prompt_scores = prompt_scores
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
        return StepResult(step_id=self._step_id, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

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
    """

    def __init__(
        self,
        plan: StepPlan,
        positions: Positions,
        fetch: Fetch,
        logprob_places: np.ndarray | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        super().__init__(plan, positions.rows, fetch, prompt_scores=prompt_scores)
        self._positions, self._logprob_places = positions, logprob_places

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
