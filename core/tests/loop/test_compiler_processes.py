"""Compilers that run away: each is ended, says why, and costs nobody else anything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.interfaces.grammar import CompileOptions
from engine.loop.compiler_processes import CompilerProcesses
from engine.types.errors import EngineError, InvalidRequestError

HERE = Path(__file__).parent


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CompilerProcesses]]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    made: list[CompilerProcesses] = []

    def build(compiler: str = "Runaway", **options: float) -> CompilerProcesses:
        limits = CompileOptions(**{"compile_timeout": 1.0, "compile_memory": 128, **options})
        made.append(CompilerProcesses(f"runaway_compilers:{compiler}", limits, 3, lambda: [b"a", None, b"c"]))
        return made[-1]

    yield build
    for processes in made:
        processes.close()


def test_it_compiles_with_the_vocabulary_at_hand(make: Callable[..., CompilerProcesses]) -> None:
    compile_apart = make()
    assert compile_apart(b"echo one") == b"one|a?c"
    assert compile_apart(b"pid") == compile_apart(b"pid"), "the process stays"


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
    compile_apart = make(compile_processes=1)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        compile_apart(source)
    assert compile_apart(b"echo 2") == b"2|a?c"
    assert time.monotonic() - began < 30


def test_what_ran_away_is_refused_at_once_when_it_comes_again(make: Callable[..., CompilerProcesses]) -> None:
    compile_apart = make(compile_processes=1)
    with pytest.raises(InvalidRequestError, match="longer than the 1 s"):
        compile_apart(b"sleep 60")
    pid = compile_apart(b"pid")
    with pytest.raises(InvalidRequestError, match="longer than the 1 s"):
        compile_apart(b"sleep 60")
    assert compile_apart(b"pid") == pid, "no process had to end for it"


@pytest.mark.parametrize("how", ["kill", "term"])
def test_one_that_is_ended_from_outside_is_replaced_and_its_source_compiled(
    make: Callable[..., CompilerProcesses], how: str
) -> None:
    """In the middle of a source, and while it has nothing to do."""
    compile_apart = make(compile_processes=1, compile_timeout=20.0)
    first = int(compile_apart(b"pid"))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(compile_apart, b"hold 1")
        time.sleep(0.3)
        (psutil.Process(first).kill if how == "kill" else psutil.Process(first).terminate)()
        assert running.result() == b"done"
    second = int(compile_apart(b"pid"))
    assert second != first
    psutil.Process(second).kill()
    assert compile_apart(b"echo 2") == b"2|a?c"


def test_who_is_always_ended_from_outside_is_told_and_nothing_is_remembered_of_its_source(
    make: Callable[..., CompilerProcesses],
) -> None:
    compile_apart = make(compile_processes=1)
    for _ in range(2):
        with pytest.raises(EngineError, match="2 compiling processes were ended from outside .Killed") as found:
            compile_apart(b"killed")
        assert not isinstance(found.value, InvalidRequestError)
    assert not compile_apart._runaways


def test_an_unforeseen_error_is_no_fault_of_the_request(make: Callable[..., CompilerProcesses]) -> None:
    compile_apart = make()
    with pytest.raises(EngineError, match="ZeroDivisionError: in the library") as found:
        compile_apart(b"fail")
    assert not isinstance(found.value, InvalidRequestError)
    assert compile_apart(b"echo 2") == b"2|a?c"


def test_a_compiler_that_cannot_be_built(make: Callable[..., CompilerProcesses]) -> None:
    with pytest.raises(EngineError, match="ImportError: no such library"):
        make("Unbuildable")(b"echo")


def test_a_child_that_dies_while_it_starts_is_no_dead_engine(make: Callable[..., CompilerProcesses]) -> None:
    with pytest.raises(EngineError, match="compiler runaway_compilers:Dying.*starting; exit code 5") as found:
        make("Dying")(b"echo")
    assert found.value.code == EngineError.code, "`engine_dead` would have the whole core given up"


def test_one_that_takes_long_keeps_nobody_waiting(make: Callable[..., CompilerProcesses]) -> None:
    compile_apart = make(compile_processes=2, compile_timeout=20.0)
    with ThreadPoolExecutor(4) as threads:
        slow = threads.submit(compile_apart, b"hold 3")
        time.sleep(0.1)
        others = [threads.submit(compile_apart, b"echo %d" % i) for i in range(3)]
        assert [other.result() for other in others] == [b"0|a?c", b"1|a?c", b"2|a?c"]
        assert not slow.done()
        assert slow.result() == b"done"


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
    compile_apart = make()
    compile_apart.prepare()
    pid = imported()
    compile_apart.prepare()
    assert compile_apart(b"pid") == str(pid).encode() and compile_apart(b"echo 2") == b"2|a?c"
    compile_apart.prepare()
    ours = psutil.Process().children()
    assert [child.pid for child in ours if "engine.loop.compiler_process" in child.cmdline()] == [pid], "one is enough"


def test_one_that_is_prepared_and_dies_is_replaced(
    make: Callable[..., CompilerProcesses], imported: Callable[[], int]
) -> None:
    compile_apart = make()
    compile_apart.prepare()
    psutil.Process(pid := imported()).kill()
    time.sleep(0.1)
    assert compile_apart(b"pid") != str(pid).encode()


def test_close_ends_one_that_is_prepared(make: Callable[..., CompilerProcesses], imported: Callable[[], int]) -> None:
    before = set(psutil.Process().children())
    compile_apart = make()
    compile_apart.prepare()
    pid = imported()
    compile_apart.close()
    assert not psutil.pid_exists(pid)
    compile_apart.prepare()
    assert set(psutil.Process().children()) <= before


def test_close_ends_what_is_compiled(make: Callable[..., CompilerProcesses]) -> None:
    compile_apart = make(compile_timeout=60.0)
    pid = int(compile_apart(b"pid"))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(compile_apart, b"hold 60")
        time.sleep(0.2)
        threading.Timer(0.2, compile_apart.close).start()
        with pytest.raises(EngineError, match="shutting down"):
            running.result(10)
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineError, match="shutting down"):
        compile_apart(b"echo")


@pytest.mark.parametrize("pid", ["int(processes(b'pid'))", "processes.prepare() or [*processes._children][0].pid"])
def test_it_leaves_with_its_parent(tmp_path: Path, pid: str) -> None:
    """A parent that is killed closes nothing; the end of the pipe does. So does one that has been told nothing yet."""
    script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from engine.interfaces.grammar import CompileOptions
from engine.loop.compiler_processes import CompilerProcesses
processes = CompilerProcesses("runaway_compilers:Runaway", CompileOptions(), 1, lambda: [b"a"])
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
