"""An executor with a simulated device: each step takes a fixed time, one after the other, in a thread of its own.

It behaves as an accelerator with a queue does. A step that was sent while the one before still runs begins when that
ends; one that was sent later leaves the device idle in between. A step whose masks follow computes at once, and ends
when its time is over or when its masks have come, whichever is later. The thread sleeps, so the engine's own work
overlaps with the device's; that the thread wakes up a little late tells the engine late and does not slow the device.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.types.plan import Masks, StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart

_Sent = tuple[StepPlan, float, "Future[StepResult]", "Future[float] | None"]


class DeviceExecutor:
    """Implements `engine.interfaces.executor.Executor`. A row draws the lowest id that its mask allows, or id 7.

    Args:
        step_seconds: of one step.
        num_pages: what its one worker answers.
    """

    def __init__(self, step_seconds: float, num_pages: int) -> None:
        self._step_seconds = step_seconds
        self._num_pages = num_pages
        self._queue: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._masks: dict[int, Masks] = {}
        self._open: Future[float] | None = None
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def start(self, message: WorkerStart) -> WorkerReady:
        return WorkerReady(num_pages=self._num_pages, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0.0)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._open = Future() if plan.masks_follow else None
        self._queue.put((plan, time.monotonic(), future, self._open))
        return future

    def sample(self, step_id: int, masks: Masks) -> None:
        assert self._open is not None
        self._masks[step_id] = masks
        self._open.set_result(time.monotonic())

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        """There is no worker to call, and no drafter."""
        if method == "drafts":
            raise NotImplementedError("a simulated device drafts nothing: leave drafts or constraints out")
        return []

    def check_health(self) -> None:
        """It lives."""

    def shutdown(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        free_at = 0.0
        while (sent := self._queue.get()) is not None:
            plan, sent_at, future, opened = sent
            free_at = max(free_at, sent_at) + self._step_seconds
            _sleep_until(free_at)
            if opened is not None:
                free_at = max(free_at, opened.result())
            future.set_result(StepResult(step_id=plan.step_id, tokens=self._draw(plan)))

    def _draw(self, plan: StepPlan) -> np.ndarray:
        tokens = np.where(plan.samples, np.int32(7), np.int32(-1))
        masks = self._masks.pop(plan.step_id, None)
        if masks is not None and masks.row.size:
            allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
            tokens[masks.row] = allowed.argmax(axis=1)
        return tokens


def _sleep_until(moment: float) -> None:
    while (rest := moment - time.monotonic()) > 0:
        time.sleep(rest)
