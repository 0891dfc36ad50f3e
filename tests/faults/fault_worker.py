"""The engine's own worker, to which something happens at a step. Importable by cores and ranks, see `faulty`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from jumping_clock import jumping

from engine.runner.worker import TorchWorker
from engine.types.plan import LogprobRows, StepPlan, StepResult
from engine.types.start import WorkerReady
from engine_reference.communicator_gloo.gloo import Gloo

FATE, STEP, RANK = "FAULT_FATE", "FAULT_STEP", "FAULT_RANK"
if os.environ.get("FAULT_CLOCK"):
    time.time = jumping()  # of this whole process


def _loop() -> None:
    while True:
        pass


def _raise(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


BEFORE: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(7),
    "leaves": _raise(SystemExit(9)),
    "crashes": lambda: ctypes.string_at(0),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loops": _loop,
    "sleeps": lambda: time.sleep(3600),
    "has no memory": _raise(MemoryError()),
    "has no device memory": _raise(torch.OutOfMemoryError("tried to allocate 20.00 GiB")),
    "raises": _raise(RuntimeError("the device fell off the bus")),
}
"""What happens instead of a step."""


def _break_collectives() -> None:
    for method in ("all_reduce", "all_gather"):
        setattr(Gloo, method, lambda *_: _raise(RuntimeError("the cable is out"))())


DURING: dict[str, Callable[[], Any]] = {"cannot talk": _break_collectives}
"""What happens before a step, which is then tried."""


def _with(**changes: Any) -> Callable[[StepResult], Any]:
    return lambda result: msgspec.structs.replace(result, **changes)


def _scores(rows: int, row: int) -> LogprobRows:
    ones = np.ones(rows, np.int32)
    values = np.zeros((rows, 1), np.float32)
    return LogprobRows(row=ones * row, chosen=values[:, 0], rank=ones, top_ids=ones[:, None], top_values=values)


GARBAGE: dict[str, Callable[[StepResult], Any]] = {
    "another step": lambda result: msgspec.structs.replace(result, step_id=result.step_id + 1),
    "too few rows": lambda result: msgspec.structs.replace(result, tokens=result.tokens[:-1]),
    "too many rows": lambda result: msgspec.structs.replace(result, tokens=np.append(result.tokens, result.tokens)),
    "out of the vocabulary": lambda result: msgspec.structs.replace(result, tokens=result.tokens + 10**6),
    "no token": lambda result: msgspec.structs.replace(result, tokens=np.full_like(result.tokens, -1)),
    "negative": lambda result: msgspec.structs.replace(result, tokens=np.full_like(result.tokens, -7)),
    "floats": lambda result: msgspec.structs.replace(result, tokens=result.tokens.astype(np.float32)),
    "several columns": lambda result: msgspec.structs.replace(result, tokens=np.stack([result.tokens] * 2, axis=1)),
    "a scalar": _with(tokens=np.array(3, np.int32)),
    "a list": lambda result: msgspec.structs.replace(result, tokens=result.tokens.tolist()),
    "scores of other rows": _with(logprobs=_scores(1, 10**6)),
    "nothing": lambda result: None,
    "text": lambda result: "done",
    "an object": lambda result: object(),
}
"""What comes instead of a result."""


class Spoilt:
    """A step whose result is another."""

    def __init__(self, future: Any, spoil: Callable[[StepResult], Any]) -> None:
        self._future = future
        self._spoil = spoil

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        return self._spoil(self._future.result(timeout))


class FaultyWorker(TorchWorker):
    """Does what the environment says, once it is called for that step by that rank (the last, if none is named)."""

    def start(self) -> WorkerReady:
        if self._mine and os.environ[STEP] == "start":
            BEFORE[os.environ[FATE]]()
        return super().start()

    def execute(self, plan: StepPlan) -> Any:
        fate = os.environ[FATE]
        if not self._mine or str(plan.step_id) != os.environ[STEP]:
            return super().execute(plan)
        if fate in DURING:
            DURING[fate]()
            return super().execute(plan)
        if fate in BEFORE:
            BEFORE[fate]()
        return Spoilt(super().execute(plan), GARBAGE[fate])

    @property
    def _mine(self) -> bool:
        return self._start.place.rank == int(os.environ.get(RANK, self._start.parallel.world - 1))
