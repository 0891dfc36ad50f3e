"""Steps on their way to a result: launched, waiting for masks, or failed. Each is a `StepFuture`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from engine.interfaces.executor import StepFuture
from engine.types.plan import Masks, StepResult

_POLL_SECONDS = 0.0001


class RunningStep:
    """A launched step, whose results are on their way to the host.

    Args:
        step_id: of the plan.
        arrays: on the device.
        take: makes the result of them, on the host.

    Attributes:
        learn: is told the result once, when it is there.
    """

    def __init__(
        self, step_id: int, arrays: Sequence[jax.Array], take: Callable[[list[np.ndarray]], StepResult]
    ) -> None:
        self._step_id = step_id
        self._arrays = arrays
        self._take = take
        self._result: StepResult | None = None
        self.learn: Callable[[StepResult], None] | None = None
        for array in arrays:
            array.copy_to_host_async()

    @property
    def taken(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    def done(self) -> bool:
        """True once `result` would not block."""
        return self._result is not None or all(array.is_ready() for array in self._arrays)

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the step. Raises TimeoutError after `timeout` seconds."""
        if self._result is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            while deadline is not None and not self.done():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"step {self._step_id} is not done after {timeout} s")
                time.sleep(_POLL_SECONDS)
            self._result = self._take([np.asarray(array) for array in self._arrays])
            self._arrays = ()
            if self.learn is not None:
                self.learn(self._result)
        return self._result


class FailedStep:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> StepResult:
        """Raise what it raised."""
        raise self._error


class PendingSample:
    """Not done until it was sampled.

    Args:
        step_id: of the plan.
        draw: the rest of the step.
        drafts: of each row.
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
        """True once it was sampled and that is done."""
        return self._rest is not None and self._rest.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """Raises RuntimeError where the masks have not come: whoever waits here is who would have to bring them."""
        if self._rest is None:
            raise RuntimeError(f"step {self.step_id} waits for its masks: call sample first")
        return self._rest.result(timeout)
