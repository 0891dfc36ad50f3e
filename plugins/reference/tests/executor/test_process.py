"""The executor with a process a rank, over workers without torch: what it carries, and how it ends.

After each of these tests nothing is left: no process, no directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from cores import LAYOUTS, worker_start
from schedules import Settings

from engine.interfaces.context import CoreContext
from engine.interfaces.executor import ExecutorNeed
from engine.process import wire
from engine.types.errors import ConfigError, EngineDeadError, EngineError, InvalidRequestError, KVCacheTooSmallError
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.plan import Masks, NewBlocks, NewSlot, StepPlan
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.ranks import RankAnswer
from engine_reference.executor_process.body import Process
from engine_reference.executor_process.card import ProcessExecutor, ProcessOptions
from engine_reference.executor_process.messages import Done

HERE = Path(__file__).parent
SETTINGS = Settings(
    num_pages=8, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, in_flight=1, enable_prefix_caching=True
)


def message(fate: str = "", size: int = 2) -> WorkerStart:
    start = worker_start(LAYOUTS["full"], SETTINGS)
    return msgspec.structs.replace(
        start, parallel=Parallel(tp=size), files=msgspec.structs.replace(start.files, name=fate)
    )


def make(worker: str = "rank_workers:EchoWorker", **options: float) -> Process:
    return Process(
        CoreContext(
            layout=LAYOUTS["full"], max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, worker=worker,
            options=ProcessOptions(**options),
        )
    )  # fmt: skip


class Running:
    """An executor that was started, and what must not outlive it."""

    def __init__(self, executor: Process, ready: WorkerReady) -> None:
        self.executor = executor
        self.ready = ready
        assert executor._ranks is not None
        self.pids = executor._ranks.pids
        self.directory = Path(executor._ranks.directory)

    def assert_nothing_left(self) -> None:
        assert not [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert not self.directory.exists()


Starter = Callable[..., Running]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Everything of a test is made in here. Its path is short, as those of sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))
    yield path
    path.rmdir()  # it must be empty


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Starter]:
    """start(fate, size, options...): a started executor; at the end all are shut down, twice, and leave nothing."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    made: list[Running] = []
    executors: list[Process] = []

    def starter(fate: str = "", size: int = 2, **options: float) -> Running:
        executors.append(make(**options))
        made.append(Running(executors[-1], executors[-1].start(message(fate, size))))
        assert len(made[-1].pids) == size and made[-1].directory.parent == folder
        return made[-1]

    yield starter
    for executor in executors:
        executor.shutdown()
        executor.shutdown()
    for running in made:
        running.assert_nothing_left()
    assert list(folder.iterdir()) == []
    assert not [c for c in psutil.Process().children() if "executor_process" in " ".join(c.cmdline())]


def plan(step_id: int, *, new: bool = False) -> StepPlan:
    """One row in slot 1, with all that travels."""
    row = np.array([1], np.int32)
    slot = NewSlot(
        slot=1, request_id="r", token_ids=np.array([3, 4, 5], np.int32), num_prompt_tokens=3,
        params=SamplingParams(seed=2**64 - 1, top_k=100), stop_token_ids=np.empty(0, np.int32),
    )  # fmt: skip
    return StepPlan(
        step_id=step_id, slot_of_row=row, num_computed=row * step_id, num_tokens=row, samples=np.ones(1, bool),
        num_decodes=1, new_slots=[slot] if new else [], new_blocks=[NewBlocks(slot=row, index=row, page=row)],
    )  # fmt: skip


def token(step_id: int) -> int:
    return 3 + 4 + 5 + 100 + 1 + step_id


# -- what it carries -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 3])
def test_steps_calls_and_answers(start: Starter, size: int) -> None:
    running = start(size=size)
    ready, executor = running.ready, running.executor
    assert (ready.num_pages, ready.load_seconds) == (101 - size, size - 1.0)  # the smallest, the longest
    assert (ready.weight_bytes, ready.cache_bytes, ready.num_parameters) == (10 * size, 20 * size, 5 * size)
    futures = [executor.execute(plan(0, new=True)), executor.execute(plan(1)), executor.execute(plan(2))]
    assert futures[2].result(timeout=20).tokens.tolist() == [token(2)]  # asked out of order
    assert futures[0].done() and futures[1].done()
    for step_id, future in enumerate(futures[:2]):
        result = future.result()
        assert (result.step_id, result.tokens.dtype, result.tokens.tolist()) == (step_id, np.int32, [token(step_id)])
        assert result.logprobs is not None and result.logprobs.top_ids.shape == (1, 2)
    cores = len(os.sched_getaffinity(0))
    assert executor.call("who", 5, "x") == [[rank, size, max(1, cores // size), 5, "x"] for rank in range(size)]
    assert executor.call("rendezvous") == [str(running.directory)] * size
    executor.check_health()


def test_errors_of_calls_are_the_callers(start: Starter) -> None:
    executor = start().executor
    with pytest.raises(InvalidRequestError, match="so it is"):
        executor.call("refuse")
    with pytest.raises(EngineError, match="does not travel"):
        executor.call("untravelled")
    with pytest.raises(ConfigError, match=r"call 'worker.refuses'; .*no such method .*did you mean 'refuse'"):
        executor.call("refuses")
    with pytest.raises(ConfigError, match=r"its methods are: .*rendezvous.*who"):
        executor.call("nothing")
    assert executor.call("who")[1][0] == 1
    assert executor.execute(plan(0, new=True)).result(timeout=20).tokens.tolist() == [token(0)]


def test_done_is_honest_and_steps_overlap(start: Starter) -> None:
    """A device with a queue gets the next step while the last one runs."""
    executor = start("late").executor
    first, second = executor.execute(plan(0, new=True)), executor.execute(plan(1))
    assert not first.done()
    with pytest.raises(TimeoutError):
        second.result(timeout=0.01)
    while not first.done():
        time.sleep(0.001)
    asked = time.monotonic()
    assert first.result().tokens.tolist() == [token(0)]
    assert time.monotonic() - asked < 0.02, "done means that `result` does not block"
    assert second.result(timeout=20).tokens.tolist() == [token(1)]
    for launches in executor.call("launches"):
        (_, one), (_, two) = launches
        assert two - one < 0.14


def masks(first_word: int) -> Masks:
    return Masks(row=np.zeros(1, np.int32), bits=np.array([[first_word, 7]], np.int32))


def test_a_step_stays_open_until_its_masks_come_to_every_rank(start: Starter) -> None:
    executor = start(size=3).executor
    future = executor.execute(msgspec.structs.replace(plan(0, new=True), masks_follow=True))
    assert executor.call("who")[2][0] == 2, "calls are answered meanwhile"
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    executor.sample(0, masks(-(2**31)))  # the bits keep their sign
    after = executor.execute(plan(1))
    assert future.result(timeout=20).tokens.tolist() == [token(0) - 2**31]
    assert after.result(timeout=20).tokens.tolist() == [token(1)]


def test_a_rank_that_cannot_sample(start: Starter) -> None:
    executor = start("cannot sample").executor
    future = executor.execute(msgspec.structs.replace(plan(0, new=True), masks_follow=True))
    executor.sample(0, masks(1))
    with pytest.raises(EngineDeadError, match="sample step 0 on rank 1 of 2.*fell off the bus"):
        future.result(timeout=20)


def test_threads_are_an_option(start: Starter) -> None:
    assert start(threads=3).executor.call("who") == [[0, 2, 3], [1, 2, 3]]


def test_two_engines_side_by_side(start: Starter) -> None:
    one, other = start(), start()
    futures = [running.executor.execute(plan(0, new=True)) for running in (one, other)]
    assert [future.result(20).tokens.tolist() for future in futures] == [[token(0)]] * 2
    one.executor.shutdown()
    one.assert_nothing_left()
    other.executor.check_health()


# -- how it ends -----------------------------------------------------------------------------------------------------
def test_a_ranks_own_error_at_start_is_raised(start: Starter) -> None:
    """Not that of the rank that only lost its partner."""
    with pytest.raises(KVCacheTooSmallError, match="no memory"):
        start("no memory on rank 1")


def test_a_rank_killed_at_start(start: Starter) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 \(process \d+, ended by signal 9\)"):
        start("killed at start")


def test_a_rank_that_is_never_ready(start: Starter) -> None:
    with pytest.raises(EngineDeadError, match=r"not ready after 1 s: rank 0 of 2 .*rank 1 of 2 .*start_timeout"):
        start("never ready", start_timeout=1)


def test_a_rank_killed_while_idle(start: Starter) -> None:
    running = start()
    executor = running.executor
    assert executor.execute(plan(0, new=True)).result(20).tokens.tolist() == [token(0)]
    os.kill(running.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 \(process \d+, ended by signal 9\)"):
        eventually(executor.check_health)
    running.assert_nothing_left()
    for call in (executor.check_health, lambda: executor.call("who"), lambda: executor.execute(plan(1))):
        with pytest.raises(EngineDeadError, match="signal 9"):
            call()


@pytest.mark.parametrize(
    ("fate", "found"),
    [
        ("killed", r"rank 1 of 2 \(process \d+, ended by signal 9\)"),
        ("exits", r"rank 1 of 2 \(process \d+, ended with exit code 7\)"),
        ("hangs", r"no answer for 0.5 s from rank 1 of 2 \(process \d+, sleeping\)"),
        ("draws otherwise", r"of 2 \(process \d+, \w+\) drew other tokens"),
    ],
)
def test_a_rank_lost_in_a_step(start: Starter, fate: str, found: str) -> None:
    """Named, though another rank complained first; earlier results stay; nothing is left at once."""
    running = start(fate, step_timeout=0.5 if fate == "hangs" else 30)
    first = running.executor.execute(plan(0, new=True))
    assert first.result(20).tokens.tolist() == [token(0)]
    second = running.executor.execute(plan(1))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=found):
        second.result()
    assert time.monotonic() - began < 5
    assert second.done(), "there is nothing to wait for"
    running.assert_nothing_left()
    assert first.result().tokens.tolist() == [token(0)]
    with pytest.raises(EngineDeadError, match=found):
        running.executor.execute(plan(2))


def test_a_rank_that_raises_while_another_waits_for_it(start: Starter) -> None:
    running = start("raises")
    future = running.executor.execute(plan(0, new=True))
    with pytest.raises(
        EngineDeadError, match=r"compute step 0 on rank 1 of 2; RuntimeError: the device fell off the bus"
    ):
        future.result()
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"\xff\x00 nonsense", "read what rank 0 sent"),
        (wire.encode(Done(7, RankAnswer(step_id=0))), "a message of rank 7, where 2 are"),
        (wire.encode(Done(0, RankAnswer(step_id=99))), "answered step 99, which nobody waits for"),
        (
            wire.encode(
                {"type": "done", "rank": 0, "step_id": 0, "checksum": 0, "result": {"step_id": 0, "tokens": 5}}
            ),
            "rank 0 sent",
        ),
    ],
)
def test_what_no_rank_should_say(start: Starter, said: bytes, found: str) -> None:
    running = start("late")
    future = running.executor.execute(plan(0, new=True))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{running.directory}/outputs")
        socket.send(said)
        with pytest.raises(EngineDeadError, match=found):
            future.result()
    running.assert_nothing_left()


def test_an_answer_without_a_result(start: Starter) -> None:
    """A rank that speaks in the name of the first."""
    running = start("sleeps")
    future = running.executor.execute(plan(0, new=True))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{running.directory}/outputs")
        for rank in range(2):
            socket.send(wire.encode(Done(rank, RankAnswer(step_id=0))))
        with pytest.raises(EngineDeadError, match="no rank answered with a result"):
            future.result()
    running.assert_nothing_left()


def test_no_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(EngineDeadError, match=r"start rank 0; no directory can be made .*TMPDIR"):
        make().start(message())


def test_a_rank_whose_parent_dies_before_it_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "engine_reference.executor_process.rank", str(folder)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr == "" and not folder.exists()


def test_a_stopped_rank_is_named_as_stopped(start: Starter) -> None:
    running = start(step_timeout=0.5)
    os.kill(running.pids[1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"from rank 1 of 2 \(process \d+, stopped\)"):
        running.executor.execute(plan(0, new=True)).result()
    running.assert_nothing_left()


def test_a_stopped_rank_is_found_by_those_who_do_not_wait(start: Starter) -> None:
    running = start(step_timeout=0.3)
    os.kill(running.pids[1], signal.SIGSTOP)
    answers, until = running.executor.ask("pid"), time.monotonic() + 60
    with pytest.raises(EngineDeadError, match=r"from rank 1 of 2 \(process \d+, stopped\)"):
        while answers() is None and time.monotonic() < until:
            time.sleep(0.02)
    running.assert_nothing_left()


def test_a_stopped_rank_does_not_outlive_a_shutdown(start: Starter) -> None:
    running = start()
    os.kill(running.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    running.executor.shutdown()
    assert 2 < time.monotonic() - began < 5, "it gets its time to leave"
    running.assert_nothing_left()


def test_time_while_nobody_waits_does_not_count(start: Starter) -> None:
    running = start("late", step_timeout=0.3)
    future = running.executor.execute(plan(0, new=True))
    time.sleep(0.5)
    assert future.result().tokens.tolist() == [token(0)]


def test_forgotten_executors_leave_nothing(start: Starter) -> None:
    executor = make()
    running = Running(executor, executor.start(message()))
    del executor
    running.executor = None  # type: ignore[assignment]
    running.assert_nothing_left()


def test_ranks_leave_when_their_parent_is_killed(start: Starter, folder: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parents[3] / 'core' / 'tests' / 'loop')!r}]\n"
        "import test_process as t, time\n"
        "running = t.Running(e := t.make(), e.start(t.message()))\n"
        "print(*running.pids, running.directory, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    assert parent.stdout is not None
    *pids, directory = parent.stdout.readline().split()
    assert all(psutil.pid_exists(int(pid)) for pid in pids) and Path(directory).exists() and len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (Path(directory).exists() or any(_runs(int(pid)) for pid in pids)):
        time.sleep(0.02)
    assert not Path(directory).exists() and not any(_runs(int(pid)) for pid in pids)


def _runs(pid: int) -> bool:
    """An orphan's zombie is its new parent's to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(call: Callable[[], None], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        call()
        time.sleep(0.02)


def test_card() -> None:
    assert ProcessExecutor.unsupported(ExecutorNeed(parallel=Parallel(tp=4))) == []
    assert ProcessExecutor.Options is ProcessOptions
    with pytest.raises(ValueError, match="step_timeout"):
        ProcessOptions(step_timeout=0)


def test_not_started() -> None:
    executor = make()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="not started"):
        executor.check_health()
