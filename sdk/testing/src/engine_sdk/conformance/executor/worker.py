"""A worker without torch and without a model: what it draws shows what reached it. Executors start it by its name."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine.types.errors import EngineError, InvalidRequestError, KVCacheTooSmallError
from engine.types.plan import LogprobRows, Masks, StepPlan, StepResult
from engine.types.start import WorkerReady, WorkerStart

LATE_SECONDS = 0.2
HELD_SECONDS = 3.0
"""The longest that a step is held."""
HELD = "held until "
"""Before the path of a file that lets steps go on."""
FELL_OFF = "the device fell off the bus"


class LateStep:
    """Done after a while, as on a device with a queue."""

    def __init__(self, result: StepResult, seconds: float) -> None:
        self._result = result
        self._due = time.monotonic() + seconds

    def done(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self._due

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for it. Raises TimeoutError."""
        left = self._due - time.monotonic()
        if timeout is not None and left > timeout:
            time.sleep(timeout)
            raise TimeoutError
        time.sleep(max(0.0, left))
        return self._result


class EchoWorker:
    """See `engine.interfaces.executor.Worker`. The name of the start message's checkpoint says what shall happen."""

    def __init__(self, message: WorkerStart) -> None:
        self.message = message
        self.fate = message.files.name
        self.sums: dict[int, int] = {}
        self.steps: list[int] = []
        self.open: tuple[int, np.ndarray, Future[StepResult]] | None = None

    @property
    def last(self) -> bool:
        """The rank that misfortune befalls."""
        return self.message.place.rank == self.message.parallel.world - 1

    def start(self) -> WorkerReady:
        """As many pages as tell the ranks apart."""
        if self.fate == "no memory" and self.last:
            raise KVCacheTooSmallError("allocate the pool", "there is no memory", "use less")
        if self.fate == "killed at start" and self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        rank = self.message.place.rank
        return WorkerReady(
            num_pages=100 - rank, weight_bytes=10, cache_bytes=20, num_parameters=5, load_seconds=float(rank)
        )

    def execute(self, plan: StepPlan) -> Any:
        """A row's token: the sum of what entered its slot, the slot, the step's number and of its computed tokens."""
        self.steps.append(plan.step_id)
        for new in plan.new_slots:
            params = new.params
            self.sums[new.slot] = int(new.token_ids.sum()) + params.top_k + int(params.seed or 0) % 1009
        if plan.step_id == 1 and self.last:
            if self.fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fate == "raises":
                raise RuntimeError(FELL_OFF)
        if self.fate.startswith(HELD):
            until = time.monotonic() + HELD_SECONDS
            while not os.path.exists(self.fate.removeprefix(HELD)) and time.monotonic() < until:
                time.sleep(0.001)
        slots = plan.slot_of_row.tolist()
        pages = sum(int(blocks.page.sum()) for blocks in plan.new_blocks)
        base = [self.sums[slot] + slot + plan.step_id + pages for slot in slots]
        tokens = np.array(base, np.int32) + plan.num_computed
        ones = np.ones(1, np.int32)
        logprobs = LogprobRows(
            row=ones, chosen=np.full(1, -0.1, np.float32), rank=ones, top_ids=np.array([[3, 2**31 - 1]], np.int32),
            top_values=np.array([[-np.inf, -1e-30]], np.float32),
        )  # fmt: skip
        if plan.masks_follow:
            self.open = plan.step_id, tokens, Future()
            return self.open[2]
        if plan.step_id == 1 and self.fate == "fails" and self.last:
            failed: Future[StepResult] = Future()
            failed.set_exception(EngineError("compute a step", FELL_OFF))
            return failed
        return LateStep(StepResult(step_id=plan.step_id, tokens=tokens, logprobs=logprobs), LATE_SECONDS * self.late)

    @property
    def late(self) -> bool:
        """Whether steps take a while."""
        return self.fate == "late"

    def sample(self, step_id: int, masks: Masks) -> None:
        """Adds each row's first word of bits to its token."""
        assert self.open is not None and self.open[0] == step_id
        if self.fate == "fails to sample" and self.last:
            return self.open[2].set_exception(EngineError("compute a step", FELL_OFF))
        tokens = self.open[1].copy()
        tokens[masks.row] += masks.bits[:, 0]
        self.open[2].set_result(StepResult(step_id=step_id, tokens=tokens))

    def drafts(self, step_id: int) -> list[list[int]]:
        """One for each row: the step's number."""
        assert self.open is not None and self.open[0] == step_id
        return [[step_id] for _ in self.open[1]]

    def shutdown(self) -> None:
        """Nothing is held."""

    # -- calls -------------------------------------------------------------------------------------------------------
    def who(self, *args: Any) -> list[Any]:
        """Which rank, of how many, in which process, and what came with the call."""
        return [self.message.place.rank, self.message.parallel.world, os.getpid(), *args]

    def place(self) -> str:
        """The directory in which the ranks meet."""
        return self.message.rendezvous

    def order(self) -> list[int]:
        """The steps that came, in their order."""
        return self.steps

    def refuse(self) -> None:
        """A user's error, on the last rank."""
        if self.last:
            raise InvalidRequestError("be refused", "so it is")
