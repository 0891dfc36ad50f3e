"""A step that has run its forward pass and waits for the masks to sample under."""

from __future__ import annotations

from collections.abc import Callable

from engine.interfaces.executor import StepFuture
from engine.runner.futures import FailedStep
from engine.types.plan import Masks, StepResult


class OpenStep:
    """Implements `engine.interfaces.executor.StepFuture`: not done until it was sampled.

    Args:
        step_id: of the plan.
        draw: the rest of the step.
        drafts: tells those of each row; see `engine.interfaces.executor.Worker.drafts`.
    """

    def __init__(
        self, step_id: int, draw: Callable[[Masks], StepFuture], drafts: Callable[[], list[list[int]]]
    ) -> None:
        self.step_id, self.drafts, self._draw = step_id, drafts, draw
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
