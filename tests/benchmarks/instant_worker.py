"""A worker whose tokens are there at once and make ordinary text: what remains is the work of core and server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from engine.types.plan import StepPlan, StepResult
from engine.types.start import WorkerStart
from tests.benchmarks.null_worker import NullWorker

FIRST_TOKEN, LAST_TOKEN = 300, 2300
"""Of a byte-level BPE these are pieces of words: no bytes by themselves, and no special tokens."""
_NAME = "InstantWorker"


def worker_class(tokens_per_s: float = 0.0) -> str:
    """What a core is told to start: a worker that draws at most so many tokens a second in all; 0: at once."""
    return f"{__name__}:{_NAME}{tokens_per_s:g}"


def __getattr__(name: str) -> Callable[[WorkerStart], InstantWorker]:
    """The worker of this name: nothing but its name travels to the core, so the rate stands in it."""
    if not name.startswith(_NAME):
        raise AttributeError(name)
    rate = float(name.removeprefix(_NAME))
    return lambda message: InstantWorker(message, rate)


class InstantWorker(NullWorker):
    """Implements `engine.interfaces.executor.Worker`: every step draws other tokens, without a model or a device.

    Args:
        message: see there.
        tokens_per_s: at most; 0: every step's tokens are there at once.
    """

    def __init__(self, message: WorkerStart, tokens_per_s: float = 0.0) -> None:
        super().__init__(message)
        self._span = min(LAST_TOKEN, message.model.vocab_size) - FIRST_TOKEN
        self._rate = tokens_per_s
        self._free = 0.0

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Done when it returns, which is when the rate allows it: a core that is late is not waited for twice."""
        if self._rate:
            self._free = max(self._free, time.perf_counter()) + int(plan.samples.sum()) / self._rate
            time.sleep(max(0.0, self._free - time.perf_counter()))
        return super().execute(plan)

    def one_each(self, plan: StepPlan) -> np.ndarray:
        """int32 [R]; -1 where a row draws nothing."""
        drawn = FIRST_TOKEN + (plan.step_id * 7 + plan.slot_of_row * 13) % self._span
        return np.where(plan.samples, drawn, -1).astype(np.int32)
