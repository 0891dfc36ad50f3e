"""The suite of point `executor`: workers without a model, their deaths among them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.interfaces.executor import Executor, ExecutorNeed
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError, KVCacheTooSmallError
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.plan import Masks, NewBlocks, NewSlot, StepPlan
from engine.types.start import WorkerReady, WorkerStart
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.core_contexts import core_context, start_message
from engine_sdk.conformance.executor.worker import HELD
from engine_sdk.conformance.timing import median_seconds

WORKER = "engine_sdk.conformance.executor.worker:EchoWorker"
SEED = 2**64 - 1
PATIENCE = 20.0
"""Seconds until a death has to be noticed."""
SILENT = 2.0
"""Seconds after which whoever waits for the core takes it for hung, where a worker is stopped. A driver may give
workers half of it, and no worker that a busy machine keeps waiting is to be taken for hung before it is stopped."""
ORPHANED = 8.0
"""Seconds that workers may outlive whoever started them: 5 are promised."""

each_size = pytest.mark.parametrize("size", [1, 2, 3])


class ExecutorConformance(Conformance):
    """Plans reach every worker and results come back whole; who dies is noticed; nothing is left behind."""

    point = "executor"
    protocol = "Executor"

    @classmethod
    def needs(cls) -> Sequence[ExecutorNeed]:
        return [ExecutorNeed(parallel=Parallel(tp=size)) for size in (1, 2, 8)]

    @contextlib.contextmanager
    def running(self, size: int, fate: str = "", **context: Any) -> Iterator[tuple[Executor, WorkerReady, list[int]]]:
        """A started executor, the workers' answer, and the process of each; at the end nothing may be left."""
        executor = self.made(size, **context)
        pids: list[int] = []
        try:
            ready = executor.start(self.message(size, fate))
            pids = [answer[2] for answer in executor.call("who")]
            places = executor.call("place")
            yield executor, ready, pids
        finally:
            executor.shutdown()
            executor.shutdown()
            left = [pid for pid in pids if pid != os.getpid() and _lives(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes {left} of its workers outlived the executor"
        assert not [place for place in places if place and Path(place).exists()], "the ranks' directory is left"

    def made(self, size: int, **context: Any) -> Executor:
        """A body; skipped where the card does not serve as many workers. context: replaces what a `CoreContext` has."""
        self.require(ExecutorNeed(parallel=Parallel(tp=size)))
        made = replace(core_context(self.subject(), worker=WORKER), **context)
        return self.body()(made)  # type: ignore[no-any-return]

    @staticmethod
    def message(size: int, fate: str) -> WorkerStart:
        """A start message for so many ranks."""
        start = start_message(parallel=Parallel(tp=size), num_kv_pages=100)
        return msgspec.structs.replace(start, files=msgspec.structs.replace(start.files, name=fate))

    # -- what is carried ---------------------------------------------------------------------------------------------
    @each_size
    def test_start(self, size: int) -> None:
        """One answer of all workers: the fewest pages, the longest time, sums of what they hold."""
        with self.running(size) as (executor, ready, _):
            assert (ready.num_pages, ready.load_seconds) == (101 - size, size - 1.0)
            assert (ready.weight_bytes, ready.cache_bytes, ready.num_parameters) == (10 * size, 20 * size, 5 * size)
            executor.check_health()

    @each_size
    def test_steps(self, size: int) -> None:
        """Results are those of their own steps, in whatever order they are asked for; every worker gets every step, in
        the order of the calls; numbers come through whole."""
        with self.running(size) as (executor, _, _):
            plans = [plan_of(step) for step in range(4)]
            futures = [executor.execute(plan) for plan in plans]
            for step in (3, 1, 0, 2):
                result = futures[step].result(timeout=PATIENCE)
                assert futures[step].done()
                assert result.step_id == step and result.tokens.dtype == np.int32
                assert result.tokens.tolist() == tokens_of(step)
                assert result.logprobs is not None and result.logprobs.top_ids.tolist() == [[3, 2**31 - 1]]
                assert result.logprobs.top_values.dtype == np.float32 and result.logprobs.top_values[0, 0] == -np.inf
                assert result.prompt_logprobs is None and result.news is None
            assert executor.call("order") == [[0, 1, 2, 3]] * size
            untouched = [plan_of(step) for step in range(4)]
            assert [msgspec.json.encode(p, enc_hook=_plain) for p in plans] == [
                msgspec.json.encode(p, enc_hook=_plain) for p in untouched
            ], "a plan was changed"

    def test_futures(self) -> None:
        """`done` is honest: where it is True `result` does not block; where it is not, `result` keeps its time."""
        with self.running(1, "late") as (executor, _, _):
            first, second = executor.execute(plan_of(0)), executor.execute(plan_of(1))
            if not second.done():
                with pytest.raises(TimeoutError):
                    second.result(timeout=0.001)
            deadline = time.monotonic() + PATIENCE
            while not first.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            start = time.monotonic()
            assert first.result().tokens.tolist() == tokens_of(0)
            assert time.monotonic() - start < 0.1, "done() was True, and result() blocked"
            assert second.result(timeout=PATIENCE).tokens.tolist() == tokens_of(1)

    @each_size
    def test_masks_that_follow(self, size: int) -> None:
        """The step stays open until the masks come, and they reach every worker; the next step goes on as ever."""
        with self.running(size) as (executor, _, _):
            future = executor.execute(msgspec.structs.replace(plan_of(0), masks_follow=True))
            assert not future.done(), "the step is done before its masks came"
            with pytest.raises(TimeoutError):
                future.result(timeout=0.05)
            assert executor.call("drafts", 0) == [[[0], [0]]] * size, "a call between a step and its masks"
            bits = np.array([[-(2**31), 7], [1000, 7]], np.int32)
            executor.sample(0, Masks(row=np.array([0, 1], np.int32), bits=bits))
            after = executor.execute(plan_of(1))
            first, second = tokens_of(0)
            assert future.result(timeout=PATIENCE).tokens.tolist() == [first - 2**31, second + 1000]
            assert after.result(timeout=PATIENCE).tokens.tolist() == tokens_of(1)

    @each_size
    def test_calls(self, size: int) -> None:
        """One answer for each rank, in order; a rank's own error is the caller's, and nobody dies of it."""
        with self.running(size) as (executor, _, pids):
            assert executor.call("who", 5, "x") == [[rank, size, pids[rank], 5, "x"] for rank in range(size)]
            for rank in range(size):
                assert executor.call("who", 6, rank=rank) == [[rank, size, pids[rank], 6]], "one rank was asked"
            with pytest.raises(InvalidRequestError, match="so it is"):
                executor.call("refuse")
            executor.check_health()
            assert executor.execute(plan_of(0)).result(timeout=PATIENCE).tokens.tolist() == tokens_of(0)

    @each_size
    def test_questions(self, size: int, tmp_path: Path) -> None:
        """Asked while a step is computed, answered behind it; nobody waits. A rank's own error is the answer's."""
        file = tmp_path / "go on"
        with self.running(size, f"{HELD}{file}") as (executor, _, pids):
            if not hasattr(executor, "ask"):
                self._apart(pids)
                pytest.fail("its workers are processes of their own, and it has no `ask`")
            step = executor.execute(plan_of(0))
            answers, error = executor.ask("who", 5), executor.ask("refuse")
            assert answers() is None and not step.done(), "the step is held"
            after = executor.execute(plan_of(1))
            file.touch()
            deadline = time.monotonic() + PATIENCE
            while (found := answers()) is None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert found == [[rank, size, pids[rank], 5] for rank in range(size)]
            assert step.done(), "the answers came before the step"
            assert after.result(timeout=PATIENCE).tokens.tolist() == tokens_of(1)
            with pytest.raises(InvalidRequestError, match="so it is"):
                error()
            executor.check_health()

    # -- errors ------------------------------------------------------------------------------------------------------
    @each_size
    def test_a_worker_that_cannot_start(self, size: int) -> None:
        """Its own typed error comes out of `start`, and nothing is left."""
        executor, before = self.made(size), _children()
        try:
            with pytest.raises(KVCacheTooSmallError, match="there is no memory"):
                executor.start(self.message(size, "no memory"))
        finally:
            executor.shutdown()
        assert not _left(before), "processes of a start that failed are left"

    @each_size
    def test_a_step_that_raises(self, size: int) -> None:
        """It is an error of its step, with the worker's own words."""
        with self.running(size, "raises") as (executor, _, _):
            assert executor.execute(plan_of(0)).result(timeout=PATIENCE).tokens.tolist() == tokens_of(0)
            with pytest.raises(Exception, match="fell off the bus"):
                executor.execute(plan_of(1)).result(timeout=PATIENCE)

    @each_size
    def test_a_step_that_fails_when_it_is_computed(self, size: int) -> None:
        """On the last rank, whose future says so after the launch: as a device's errors come. The others' results do
        not make up for it."""
        with self.running(size, "fails") as (executor, _, _):
            assert executor.execute(plan_of(0)).result(timeout=PATIENCE).tokens.tolist() == tokens_of(0)
            with pytest.raises(EngineError, match="fell off the bus"):
                executor.execute(plan_of(1)).result(timeout=PATIENCE)

    @each_size
    def test_a_step_that_fails_when_it_samples(self, size: int) -> None:
        """On the last rank, after its masks came: `sample` returns, and the step's future has the error."""
        with self.running(size, "fails to sample") as (executor, _, _):
            future = executor.execute(msgspec.structs.replace(plan_of(0), masks_follow=True))
            executor.sample(0, Masks(row=np.zeros(1, np.int32), bits=np.zeros((1, 2), np.int32)))
            with pytest.raises(EngineError, match="fell off the bus"):
                future.result(timeout=PATIENCE)

    # -- deaths ------------------------------------------------------------------------------------------------------
    def _apart(self, pids: Sequence[int]) -> None:
        if os.getpid() in pids:
            not_served("its workers live in the caller's process")

    @each_size
    def test_a_worker_that_is_killed(self, size: int) -> None:
        """In a step: EngineDeadError from the step, from health checks, and from whatever is asked afterwards."""
        with self.running(size, "") as (_, _, pids):
            self._apart(pids)
        with self.running(size, "killed") as (executor, _, _):
            assert executor.execute(plan_of(0)).result(timeout=PATIENCE).tokens.tolist() == tokens_of(0)
            start = time.monotonic()
            with pytest.raises(EngineDeadError):
                executor.execute(plan_of(1)).result(timeout=PATIENCE)
            assert time.monotonic() - start < PATIENCE
            with pytest.raises(EngineDeadError):
                executor.check_health()
            with pytest.raises(EngineDeadError):
                executor.execute(plan_of(2)).result(timeout=PATIENCE)

    @each_size
    def test_a_worker_that_dies_idle(self, size: int) -> None:
        """Between steps: the health check says so."""
        with self.running(size) as (executor, _, pids):
            self._apart(pids)
            executor.check_health()
            os.kill(pids[-1], signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE
            with pytest.raises(EngineDeadError):
                while time.monotonic() < deadline:
                    executor.check_health()
                    time.sleep(0.01)

    @pytest.mark.parametrize("how", ["asks", "waits"])
    def test_a_worker_that_stops(self, how: str) -> None:
        """It lives and answers nothing (SIGSTOP): EngineDeadError for whoever asks and looks for answers, and for
        whoever waits for a step, soon after the time that the context gives; afterwards for whatever is asked."""
        with self.running(2, step_timeout=SILENT) as (executor, _, pids):
            self._apart(pids)
            os.kill(pids[-1], signal.SIGSTOP)
            if how == "asks":
                answers: Callable[[], list[Any] | None] = executor.ask("who")  # type: ignore[attr-defined]
                deadline = time.monotonic() + PATIENCE
                with pytest.raises(EngineDeadError):
                    while answers() is None and time.monotonic() < deadline:
                        time.sleep(0.01)
            else:
                with pytest.raises(EngineDeadError):
                    executor.execute(plan_of(0)).result(timeout=PATIENCE)
            with pytest.raises(EngineDeadError):
                executor.check_health()

    @each_size
    def test_a_worker_that_dies_at_start(self, size: int) -> None:
        """EngineDeadError from `start`, and nothing is left."""
        with self.running(size) as (_, _, pids):
            self._apart(pids)
        executor, before = self.made(size), _children()
        try:
            with pytest.raises(EngineDeadError):
                executor.start(self.message(size, "killed at start"))
        finally:
            executor.shutdown()
        assert not _left(before), "processes of a start that failed are left"

    def test_after_shutdown(self) -> None:
        """Nobody is there any more: EngineDeadError, whatever is asked."""
        with self.running(1) as (executor, _, _):
            executor.shutdown()
            for ask in (lambda: executor.execute(plan_of(0)), lambda: executor.call("who"), executor.check_health):
                with pytest.raises(EngineDeadError):
                    ask()

    def test_orphans_go(self) -> None:
        """Workers whose executor's process is killed end by themselves within seconds."""
        with self.running(1) as (_, _, pids):
            self._apart(pids)
        body = self.body()
        order = {
            "path": sys.path, "subject": self.subject().plain, "body": f"{body.__module__}:{body.__qualname__}",
            "worker": WORKER, "message": msgspec.to_builtins(self.message(1, "")),
        }  # fmt: skip
        command = [sys.executable, "-m", "engine_sdk.conformance.executor.orphans", json.dumps(order)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            line = parent.stdout.readline()
            parent.kill()
        orphans, deadline = json.loads(line), time.monotonic() + ORPHANED
        while any(map(_lives, orphans)) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [pid for pid in orphans if _lives(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"workers {left} live on, {ORPHANED:.0f} s after whoever started them was killed"

    @classmethod
    def figure(cls) -> str | None:
        """What carrying a step costs."""
        with cls().running(1) as (executor, _, _):
            executor.execute(plan_of(0)).result(timeout=PATIENCE)
            plan = plan_of(2)
            seconds = median_seconds(lambda: executor.execute(plan).result(timeout=PATIENCE))
        return f"a step of two rows there and back, one worker: {seconds * 1e6:,.0f} us"


# -- plans -----------------------------------------------------------------------------------------------------------
def plan_of(step: int) -> StepPlan:
    """Two rows, in slots 1 and 3, which are new in step 0; with all that travels."""
    rows = np.array([1, 3], np.int32)
    new = [
        NewSlot(
            slot=slot, request_id=f"r{slot}", token_ids=np.array([slot, 4, 100_000], np.int32), num_prompt_tokens=3,
            params=SamplingParams(seed=SEED, top_k=50, max_tokens=8), stop_token_ids=np.empty(0, np.int32),
        )
        for slot in rows.tolist()
    ]  # fmt: skip
    return StepPlan(
        step_id=step, slot_of_row=rows, num_computed=np.array([step, step + 7], np.int32),
        num_tokens=np.ones(2, np.int32), samples=np.ones(2, bool), num_decodes=2, new_slots=new if step == 0 else [],
        new_blocks=[NewBlocks(slot=rows, index=rows, page=rows * 5)],
    )  # fmt: skip


def tokens_of(step: int) -> list[int]:
    """What the workers draw."""
    first, second = (slot + 4 + 100_000 + 50 + SEED % 1009 + slot + step + 20 for slot in (1, 3))
    return [first + step, second + step + 7]


def _plain(value: Any) -> Any:
    return [str(value.dtype), value.tolist()] if isinstance(value, np.ndarray) else str(value)


# -- processes -------------------------------------------------------------------------------------------------------
def _lives(pid: int) -> bool:
    """Whether there is such a process that is not merely waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children() -> set[int]:
    """Living processes whose parent is this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and fields[0] != "Z":
                    found.add(int(entry.name))
    return found


def _left(before: set[int]) -> set[int]:
    """Children that were not there before, a moment after the end."""
    deadline = time.monotonic() + 2.0
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
