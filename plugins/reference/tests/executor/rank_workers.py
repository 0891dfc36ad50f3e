"""Workers without torch for the executor of processes: what a rank may do, and what may befall it.

The name of a start message's checkpoint says what shall happen.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.types.errors import InvalidRequestError, KVCacheTooSmallError
from engine.types.plan import LogprobRows, Masks, StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart


class LateStep:
    """Done after a while, as on a device with a queue."""

    def __init__(self, result: StepResult, seconds: float) -> None:
        self._result = result
        self._due = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self._due

    def result(self, timeout: float | None = None) -> StepResult:
        time.sleep(max(0.0, self._due - time.monotonic()))
        return self._result


class EchoWorker:
    """A row's token is the slot plus the number of computed tokens plus the sum of what entered the slot."""

    def __init__(self, message: WorkerStart) -> None:
        self.start_message = message
        self.rank = message.place.rank
        self.fate = message.files.name
        self.sums: dict[int, int] = {}
        self.launched: list[tuple[int, float]] = []

    def start(self) -> WorkerReady:
        if self.fate == "no memory on rank 1":
            if self.rank == 1:
                time.sleep(0.2)
                raise KVCacheTooSmallError("allocate", "no memory")
            raise RuntimeError("Connection closed by peer")
        if self.fate == "killed at start" and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate in ("killed at start", "never ready"):
            time.sleep(60)
        return WorkerReady(
            num_pages=100 - self.rank, weight_bytes=10, cache_bytes=20, num_parameters=5, load_seconds=float(self.rank)
        )

    def execute(self, plan: StepPlan) -> Any:
        self.launched.append((plan.step_id, time.monotonic()))
        for new in plan.new_slots:
            self.sums[new.slot] = int(new.token_ids.sum()) + new.params.top_k
        if self.fate == "sleeps":
            time.sleep(60)
        if self.rank == 1:
            self.misbehave(plan)
        elif self.fate == "raises":
            time.sleep(60)  # in a collective, for ever
        elif self.fate == "killed" and plan.step_id == 1:
            time.sleep(0.1)
            failed: Future[StepResult] = Future()
            failed.set_exception(RuntimeError("Connection closed by peer"))
            return failed
        tokens = np.array([self.sums[s] + s + c for s, c in zip(plan.slot_of_row, plan.num_computed)], np.int32)  # noqa: B905
        if self.fate == "draws otherwise" and self.rank == 1 and plan.step_id == 1:
            tokens += 1
        ones = np.ones(1, np.int32)
        logprobs = LogprobRows(
            row=ones, chosen=np.full(1, -0.5, np.float32), rank=ones, top_ids=np.ones((1, 2), np.int32),
            top_values=np.zeros((1, 2), np.float32),
        )  # fmt: skip
        if plan.masks_follow:
            self.open = plan.step_id, tokens, Future()
            return self.open[2]
        return LateStep(StepResult(step_id=plan.step_id, tokens=tokens, logprobs=logprobs), 0.15 * self.late)

    def sample(self, step_id: int, masks: Masks) -> None:
        """Adds each row's first word of bits to its token."""
        assert self.open[0] == step_id
        if self.fate == "cannot sample" and self.rank == 1:
            raise RuntimeError("the device fell off the bus")
        tokens = self.open[1].copy()
        tokens[masks.row] += masks.bits[:, 0]
        self.open[2].set_result(StepResult(step_id=step_id, tokens=tokens))

    @property
    def late(self) -> bool:
        return self.fate == "late"

    def misbehave(self, plan: StepPlan) -> None:
        if self.fate == "killed" and plan.step_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate == "exits" and plan.step_id == 1:
            os._exit(7)
        if self.fate == "hangs" and plan.step_id == 1:
            time.sleep(60)
        if self.fate == "raises" and plan.step_id == 0:
            raise RuntimeError("the device fell off the bus")

    def shutdown(self) -> None:
        pass

    # -- calls --
    def who(self, *args: Any) -> list[Any]:
        return [self.rank, self.start_message.parallel.world, self.start_message.num_threads, *args]

    def rendezvous(self) -> str:
        return self.start_message.rendezvous

    def launches(self) -> list[Any]:
        return self.launched

    def refuse(self) -> None:
        if self.rank == 1:
            raise InvalidRequestError("refuse", "so it is")

    def untravelled(self) -> object:
        return object()
