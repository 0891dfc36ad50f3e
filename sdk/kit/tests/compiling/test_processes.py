"""Compilers that run away: each is ended, says why, and costs nobody else anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from engine.interfaces.context import GrammarContext
from engine.types.errors import EngineError, InvalidRequestError
from engine_kit.compiling import CompileOptions
from engine_kit.compiling.processes import CompilerProcesses

HERE = Path(__file__).parent
PIECES: list[bytes | None] = [b"a", None, b"c"]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CompilerProcesses]]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made: list[CompilerProcesses] = []

    def build(
        compiler: str = "Runaway",
        prepare: bool = False,
        vocabulary: Callable[[], list[bytes | None]] = lambda: PIECES,
        **options: float,
    ) -> CompilerProcesses:
        limits = CompileOptions(**{"compile_timeout": 1.0, "compile_memory": 128, **options})
        context = GrammarContext(vocab_size=3, vocabulary=vocabulary, options=limits, prepare=prepare)
        made.append(CompilerProcesses(f"runaway_compilers:{compiler}", context))
        return made[-1]

    yield build
    for processes in made:
        processes.close()


def test_it_compiles_with_the_vocabulary_at_hand(make: Callable[..., CompilerProcesses]) -> None:
    processes = make()
    assert processes.compile(b"echo one") == b"one|a?c"
    assert processes.compile(b"pid") == processes.compile(b"pid"), "the process stays"


def test_after_a_vocabulary_that_could_not_be_read_another_child_is_begun(
    make: Callable[..., CompilerProcesses],
) -> None:
    processes = make(vocabulary=Mock(side_effect=[RuntimeError("no such file"), PIECES]))
    with pytest.raises(RuntimeError, match="no such file"):
        processes.compile(b"echo one")
    assert processes.compile(b"echo one") == b"one|a?c"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"sleep 60", "longer than the 1 s.*--grammar.compile_timeout"),
        (b"hold 60", "longer than the 1 s"),
        (b"memory 2000000000", "more than the 128 MiB.*--grammar.compile_memory"),
        (b"crash abort", "more than the 128 MiB"),
        (b"crash segv", "broke down.*SIGSEGV"),
        (b"leave", "broke down.*exit code 7"),
        (b"deep", "nested too deeply"),
        (b"refuse", "structured_outputs.regex='\\('; so it is"),
    ],
)
def test_what_runs_away_is_ended_and_the_next_is_compiled(
    make: Callable[..., CompilerProcesses], source: bytes, message: str
) -> None:
    processes = make(compile_processes=1)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        processes.compile(source)
    assert processes.compile(b"echo 2") == b"2|a?c"
    assert time.monotonic() - began < 30


def test_what_ran_away_is_refused_at_once_when_it_comes_again(make: Callable[..., CompilerProcesses]) -> None:
    processes = make(compile_processes=1)
    with pytest.raises(InvalidRequestError, match="longer than the 1 s"):
        processes.compile(b"sleep 60")
    pid = processes.compile(b"pid")
    with pytest.raises(InvalidRequestError, match="longer than the 1 s"):
        processes.compile(b"sleep 60")
    assert processes.compile(b"pid") == pid, "no process had to end for it"


@pytest.mark.parametrize("how", ["kill", "term"])
def test_one_that_is_ended_from_outside_is_replaced_and_its_source_compiled(
    make: Callable[..., CompilerProcesses], how: str
) -> None:
    """In the middle of a source, and while it has nothing to do."""
    processes = make(compile_processes=1, compile_timeout=20.0)
    first = int(processes.compile(b"pid"))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(processes.compile, b"hold 1")
        time.sleep(0.3)
        (psutil.Process(first).kill if how == "kill" else psutil.Process(first).terminate)()
        assert running.result() == b"done"
    second = int(processes.compile(b"pid"))
    assert second != first
    psutil.Process(second).kill()
    assert processes.compile(b"echo 2") == b"2|a?c"


def test_who_is_always_ended_from_outside_is_told_and_nothing_is_remembered_of_its_source(
    make: Callable[..., CompilerProcesses],
) -> None:
    processes = make(compile_processes=1)
    for _ in range(2):
        with pytest.raises(EngineError, match="2 compiling processes were ended from outside .Killed") as found:
            processes.compile(b"killed")
        assert not isinstance(found.value, InvalidRequestError)
    assert not processes._runaways


def test_an_unforeseen_error_is_no_fault_of_the_request(make: Callable[..., CompilerProcesses]) -> None:
    processes = make()
    with pytest.raises(EngineError, match="ZeroDivisionError: in the library") as found:
        processes.compile(b"fail")
    assert not isinstance(found.value, InvalidRequestError)
    assert processes.compile(b"echo 2") == b"2|a?c"


def test_a_compiler_that_cannot_be_built(make: Callable[..., CompilerProcesses]) -> None:
    with pytest.raises(EngineError, match="ImportError: no such library"):
        make("Unbuildable").compile(b"echo")


@pytest.mark.parametrize(("compiler", "how"), [("Dying", "exit code 5"), ("Aborting", "signal 6")])
def test_a_child_that_dies_while_it_starts_is_no_dead_engine(
    make: Callable[..., CompilerProcesses], compiler: str, how: str
) -> None:
    with pytest.raises(EngineError, match=f"compiler runaway_compilers:{compiler}.*starting; {how}") as found:
        make(compiler).compile(b"echo")
    assert found.value.code == EngineError.code, "`engine_dead` would have the whole core given up"


def test_one_that_takes_long_keeps_nobody_waiting(make: Callable[..., CompilerProcesses]) -> None:
    processes = make(compile_processes=2, compile_timeout=20.0)
    with ThreadPoolExecutor(4) as threads:
        slow = threads.submit(processes.compile, b"hold 3")
        time.sleep(0.1)
        others = [threads.submit(processes.compile, b"echo %d" % i) for i in range(3)]
        assert [other.result() for other in others] == [b"0|a?c", b"1|a?c", b"2|a?c"]
        assert not slow.done()
        assert slow.result() == b"done"


def test_while_one_starts_no_other_is_started(
    make: Callable[..., CompilerProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a library to import, and takes the second source when it has done the first."""
    monkeypatch.setenv("RUNAWAY_IMPORTS_FOR", "1")
    processes = make(compile_processes=3)
    with ThreadPoolExecutor(3) as threads:
        pids = list(threads.map(processes.compile, [b"pid"] * 3))
    assert len(set(pids)) == 1


def test_in_this_process(make: Callable[..., CompilerProcesses], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    processes = make(compile_processes=0, prepare=True)
    assert processes.compile(b"pid") == str(os.getpid()).encode()
    with pytest.raises(InvalidRequestError, match="so it is"):
        processes.compile(b"refuse")
    assert not processes._children
    processes.close()


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The process that has imported the compiler last; waits for one."""
    monkeypatch.setenv("RUNAWAY_IMPORTED", str(path := tmp_path / "pid"))

    def wait() -> int:
        until = time.monotonic() + 20
        while not path.exists() or not path.read_text():
            assert time.monotonic() < until, "nobody has imported it"
            time.sleep(0.02)
        return int(path.read_text())

    return wait


def test_one_that_is_prepared_imports_before_it_is_needed(
    make: Callable[..., CompilerProcesses], imported: Callable[[], int]
) -> None:
    processes = make(prepare=True)
    pid = imported()
    processes.prepare()
    assert processes.compile(b"pid") == str(pid).encode() and processes.compile(b"echo 2") == b"2|a?c"
    processes.prepare()
    ours = psutil.Process().children()
    assert [child.pid for child in ours if "engine_kit.compiling.child" in child.cmdline()] == [pid], "one is enough"


def test_one_that_is_prepared_and_dies_is_replaced(
    make: Callable[..., CompilerProcesses], imported: Callable[[], int]
) -> None:
    processes = make()
    processes.prepare()
    psutil.Process(pid := imported()).kill()  # it may be noticed before a source is sent, or after
    assert processes.compile(b"pid") != str(pid).encode()


def test_close_ends_one_that_is_prepared(make: Callable[..., CompilerProcesses], imported: Callable[[], int]) -> None:
    before = set(psutil.Process().children())
    processes = make()
    processes.prepare()
    pid = imported()
    processes.close()
    assert not psutil.pid_exists(pid)
    processes.prepare()
    assert set(psutil.Process().children()) <= before


def test_close_ends_what_is_compiled(make: Callable[..., CompilerProcesses]) -> None:
    processes = make(compile_timeout=60.0)
    pid = int(processes.compile(b"pid"))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(processes.compile, b"hold 60")
        time.sleep(0.2)
        threading.Timer(0.2, processes.close).start()
        with pytest.raises(EngineError, match="shutting down"):
            running.result(10)
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineError, match="shutting down"):
        processes.compile(b"echo")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-9, "shutting down"),
        (-11, "broke down over it .SIGSEGV"),
        (-6, "more than the .* MiB"),
        (127, "more than the .* MiB"),
        (3, "broke down over it .exit code 3"),
    ],
)
def test_what_a_source_did_is_told_also_when_all_is_closed(
    make: Callable[..., CompilerProcesses], monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    processes = make()
    processes.close()
    monkeypatch.setattr(processes, "_drop", lambda child: code)
    error = processes._died(None)  # type: ignore[arg-type]
    assert re.search(message, str(error))


@pytest.mark.parametrize(
    "pid", ["int(processes.compile(b'pid'))", "processes.prepare() or [*processes._children][0].pid"]
)
def test_it_leaves_with_its_parent(tmp_path: Path, pid: str) -> None:
    """A parent that is killed closes nothing; the end of the pipe does. So does one that has been told nothing yet."""
    script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from engine.interfaces.context import GrammarContext
from engine_kit.compiling import CompileOptions
from engine_kit.compiling.processes import CompilerProcesses
context = GrammarContext(vocab_size=1, vocabulary=lambda: [b"a"], options=CompileOptions())
processes = CompilerProcesses("runaway_compilers:Runaway", context)
print({pid}, flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    until = time.monotonic() + 5
    while psutil.pid_exists(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)
