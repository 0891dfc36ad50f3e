"""An executor whose time is added up: what a caller spends in it, and what the rest of its thread's time goes to."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.interfaces.executor import Executor, StepFuture
    from engine.types.plan import Masks, StepPlan, StepResult
    from engine.types.start import WorkerReady, WorkerStart


class TimedExecutor:
    """Hands everything on to another executor; see `engine.interfaces.executor.Executor`.

    Attributes:
        seconds: that callers spent in it, waiting for results included.
        cpu_seconds: of these, what the calling thread took of the processor.
        profile: of what runs inside on the caller's thread; None for none.
    """

    def __init__(self, executor: Executor) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.profile: cProfile.Profile | None = None
        self._executor = executor

    def start(self, message: WorkerStart) -> WorkerReady:
        return self._executor.start(message)

    def execute(self, plan: StepPlan) -> StepFuture:
        with self._clock():
            return _TimedFuture(self, self._executor.execute(plan))

    def sample(self, step_id: int, masks: Masks) -> None:
        with self._clock():
            self._executor.sample(step_id, masks)

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        with self._clock():
            return self._executor.call(method, *args, rank=rank)

    def check_health(self) -> None:
        with self._clock():
            self._executor.check_health()

    def shutdown(self) -> None:
        self._executor.shutdown()

    @contextmanager
    def _clock(self) -> Iterator[None]:
        profile = self.profile
        began, cpu_began = time.perf_counter(), time.thread_time()
        if profile is not None:
            profile.enable()
        try:
            yield
        finally:
            if profile is not None:
                profile.disable()
            self.cpu_seconds += time.thread_time() - cpu_began
            self.seconds += time.perf_counter() - began


class _TimedFuture:
    def __init__(self, executor: TimedExecutor, future: StepFuture) -> None:
        self._executor = executor
        self._future = future

    def done(self) -> bool:
        with self._executor._clock():
            return self._future.done()

    def result(self, timeout: float | None = None) -> StepResult:
        with self._executor._clock():
            return self._future.result(timeout)


def python_share(profile: cProfile.Profile) -> float:
    """The share of a profile's time that went to Python's functions themselves, not to what is built in.

    The profiler makes each of their calls slower, so this is an upper bound.
    """
    entries = profile.getstats()
    whole = sum(entry.inlinetime for entry in entries)
    python = sum(entry.inlinetime for entry in entries if not isinstance(entry.code, str))
    return python / whole if whole else 0.0
