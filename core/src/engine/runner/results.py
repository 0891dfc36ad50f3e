"""Steps on their way to a result: launched, waiting for masks, or failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.interfaces.executor import StepFuture
from engine.interfaces.platform import Fetch
from engine.types.plan import Masks, StepPlan, StepResult

_POLL_SECONDS = 0.0001
Put = Callable[[StepResult, list[np.ndarray]], None]
"""See `engine.interfaces.step.StepOutput`."""


class RunningStep:
    """A launched step: implements `engine.interfaces.executor.StepFuture`.

    Args:
        plan: of the step.
        puts: what was found, one after the other: of how many tensors, and what puts them into the result.
        fetch: these tensors, on their way to the host; None for none.
    """

    def __init__(self, plan: StepPlan, puts: Sequence[tuple[int, Put]], fetch: Fetch | None) -> None:
        self._step_id = plan.step_id
        self._num_rows = plan.num_rows
        self._puts = puts
        self._fetch = fetch
        self._result: StepResult | None = None

    def done(self) -> bool:
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
        result = StepResult(step_id=self._step_id, tokens=np.full(self._num_rows, -1, np.int32))
        arrays = [] if self._fetch is None else [tensor.numpy() for tensor in self._fetch.wait()]
        end = 0
        for count, put in self._puts:
            start, end = end, end + count
            put(result, arrays[start:end])
        return result


class FailedStep:
    """A step that could not be launched: implements `engine.interfaces.executor.StepFuture`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> StepResult:
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
        return self._rest is not None and self._rest.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Raises RuntimeError where the masks have not come: whoever waits here is who would have to bring them."""
        if self._rest is None:
            raise RuntimeError(f"step {self.step_id} waits for its masks: call sample first")
        return self._rest.result(timeout)
