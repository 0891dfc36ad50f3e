"""A child process as its parent sees it, against scripts that play children: every way to live, to die and to hang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine.process import child as child_module
from engine.process import local, wire
from engine.process.child import Child
from engine.process.run import PARENT_DIED
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets and signals")


class Start(msgspec.Struct, frozen=True):
    text: str = ""


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str


PLAYED = """
import os, signal, subprocess, sys, time
import msgspec
from engine.process.run import run
from engine.types.errors import EngineDeadError, InvalidRequestError
from engine.types.messages import Beat, Shutdown

class Start(msgspec.Struct, frozen=True):
    text: str = ""

class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str

def main(start, parent):
    parent.at_end.callback(print, "the end", flush=True)
{body}
    return 0

if __name__ == "__main__":
    run("the player", Start, Said | Shutdown, main)
"""

ECHO = """
    parent.send(Said(start.text))
    while isinstance(message := parent.receive(), Said):
        parent.send(message)
"""

Make = Callable[..., Child[Said]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Start a child whose `main` has this body."""
    made: list[Child[Said]] = []

    def make(body: str, **options: Any) -> Child[Said]:
        (tmp_path / "played_child.py").write_text(PLAYED.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        made.append(Child("played_child", Start("hello"), Said, what="the player", **options))
        return made[-1]

    yield make
    for child in made:
        child.end(0)
        child.close()
        assert not Path(child.directory).exists()


def hear(child: Child[Said]) -> str:
    while (message := child.receive(20.0)) is None:
        pass
    return message.text


def death(child: Child[Said]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            child.receive(1.0)
    return caught.value


def test_both_hear_each_other_until_it_is_asked_to_stop(play: Make, capfd: pytest.CaptureFixture[str]) -> None:
    child = play(ECHO)
    child.send(Said("before it listened"))
    assert not child.ready and [hear(child), hear(child)] == ["hello", "before it listened"] and child.ready
    child.send(Said("x" * 10_000_000))
    assert len(hear(child)) == 10_000_000 and child.alive
    assert child.receive(0.01) is None
    assert child.end(20) == 0 and child.end(20) == 0 and not child.alive
    assert "the end" in capfd.readouterr().out


def test_a_child_that_starts_leaves_at_once(play: Make) -> None:
    child = play("    time.sleep(60)")
    began = time.monotonic()
    assert child.end(30) == PARENT_DIED and time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    os.kill(os.getpid(), 11)", "the player's process ended while starting; signal 11"),
        ("    os._exit(7)", "the player's process ended while starting; exit code 7"),
        ("    parent.send(Said('up')); time.sleep(0.2); os._exit(7)", "ended while running; exit code 7"),
        ("    raise ValueError('odd')", "run the player; ValueError: odd"),
        ("    raise InvalidRequestError('asked', 'found', 'do')", "asked; found; do"),
        ("    parent.send(object())", "tell another process; NotImplementedError"),
        ("    parent.outbox.put_encoded(b'nonsense'); time.sleep(60)", "read what the player sent"),
        ("    parent.send(Start()); time.sleep(60)", "read what the player sent"),
    ],
)
def test_who_is_to_blame(play: Make, body: str, found: str) -> None:
    child = play(body)
    error = death(child)
    assert (found in str(error) and not child.ready) or "running" in found
    assert type(error) is (InvalidRequestError if "asked" in found else EngineDeadError)
    assert child.lost() and child.death() is error
    child.end(20)
    assert not child.alive


@pytest.mark.usefixtures("plain_processes")
def test_it_has_what_it_is_passed(play: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        body = f"    import socket; parent.send(Said(str(socket.socket(fileno={listener.fileno()}).getsockname())))"
        assert hear(play(body, pass_fds=[listener.fileno()])) == str(listener.getsockname())


def test_out_of_memory_is_said(play: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    child = play(ECHO)
    hear(child)
    monkeypatch.setattr(child_module, "out_of_memory_kills", lambda: 10**9)
    os.kill(child.pid, signal.SIGKILL)
    assert "signal 9, and the system has run out of memory" in str(death(child))


def test_a_silent_child_is_hung_and_its_children_end_too(
    play: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "LEAVE_SECONDS", 0.2)  # they would not leave by themselves however long they had
    body = """
    one = subprocess.Popen(["sleep", "60"])
    parent.send(Said(str(one.pid)))
    for _ in range(8):
        parent.send(Beat())
        time.sleep(0.2)
    time.sleep(60)
"""
    child = play(body, silence=1.0, patience="--more")
    left = psutil.Process(int(hear(child)))
    began = time.monotonic()
    error = str(death(child))
    assert "no sign of life for 1 s" in error and "raise --more" in error and time.monotonic() - began > 1.2
    assert not child.alive
    until = time.monotonic() + 20
    while not local._ended(left) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert "in main" in capfd.readouterr().err, "it writes where it hangs"


def test_one_that_nobody_has_reaped_has_ended_too() -> None:
    one = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(one.pid)
    assert not local._ended(process)
    one.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while not local._ended(process) and time.monotonic() < until:
        time.sleep(0.01)
    assert process.status() == psutil.STATUS_ZOMBIE
    one.wait()
    assert local._ended(process)


def test_a_parent_that_was_stopped_has_not_listened(play: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    child = play(ECHO, silence=3.0)
    hear(child)
    assert not child.lost()
    now = time.monotonic()
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now + 3600)
    assert not child.lost() and not child.lost()
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now + 7200)
    assert child.lost()


@pytest.mark.parametrize("given", [subprocess.DEVNULL, subprocess.PIPE])
def test_a_child_whose_parent_dies_leaves(play: Make, tmp_path: Path, given: int) -> None:
    """Before it has its start message; and while it works."""
    play("    time.sleep(60)").end(0)
    folder = tmp_path / "sockets"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "played_child", str(folder)], stdin=given)
    if process.stdin is not None:
        process.stdin.write(wire.opening(wire.Link(), Start()))
        process.stdin.flush()
        while not (folder / "requests").exists():
            time.sleep(0.05)
        process.stdin.close()
    assert process.wait(20) == PARENT_DIED and not folder.exists()


STARTS_TWO = """
import sys, time
from engine.process.local import LocalProcess
from engine.process.wire import Link, opening
import played_child
one = LocalProcess("played_child", opening(Link(), played_child.Start("one")), "one")
print(one.pid, one.directory, flush=True)
time.sleep(60)
"""
ONE_OF_TWO = """
    if start.text == "one":
        from engine.process.local import LocalProcess
        from engine.process.wire import Link, opening
        two = LocalProcess("played_child", opening(Link(), Start("two")), "two")
        print(two.pid, two.directory, flush=True)
    else:
        print("up", flush=True)
    time.sleep(60)
"""


def halted(pid: int) -> bool:
    """All of its threads: from then on the system takes the process for stopped."""
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) <= {"T"}


def test_those_that_are_stopped_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The system continues them then, each in its turn. Else they would stay as long as nobody does."""
    (tmp_path / "played_child.py").write_text(PLAYED.format(body=ONE_OF_TWO))
    (tmp_path / "parent.py").write_text(STARTS_TWO)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.script", str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parents[3],
    ) as parent:
        assert parent.stdout is not None
        told = [parent.stdout.readline().split() for _ in range(3)]
        told.remove(["up"])  # whoever starts a process may say so after that has said that it is up
        started = [(psutil.Process(int(pid)), Path(directory)) for pid, directory in told]
        try:
            for process, directory in started:
                process.suspend()
                assert directory.exists()
            until = time.monotonic() + 20
            while not all(halted(process.pid) for process, _ in started):
                assert time.monotonic() < until
                time.sleep(0.01)
            parent.kill()
            while not all(local._ended(process) and not directory.exists() for process, directory in started):
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            for process, _ in started:
                with contextlib.suppress(psutil.Error):
                    process.kill()


STARTS_ANOTHER = """
    from engine.process.local import LocalProcess
    from engine.process.wire import Link, opening
    if start.text == "another":
        parent.receive()
        return 0
    another = LocalProcess("played_child", opening(Link(), Start("another")), "another", home=parent.directory)
    parent.send(Said(str(another.pid)))
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux names other first processes than its own")
def test_one_that_this_process_inherits_ends_with_its_parent(play: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's first process does: those of a child that was killed, stopped ones too, and nobody else."""
    monkeypatch.setattr(local, "LEAVE_SECONDS", 0.3)
    child, other = play(STARTS_ANOTHER), play(STARTS_ANOTHER)
    inherited, others = (psutil.Process(int(hear(one))) for one in (child, other))
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    assert prctl(subreaper, 1) == 0
    try:
        for process in (inherited, others):
            process.suspend()
        os.kill(child.pid, signal.SIGKILL)
        assert "ended while running; signal 9" in str(death(child))
        assert not psutil.pid_exists(inherited.pid), "it was not reaped"
        assert others.status() == psutil.STATUS_STOPPED and other.alive
    finally:
        prctl(subreaper, 0)
        others.resume()


def test_a_directory_that_is_removed_takes_no_more_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process binds in it while it is emptied would keep it."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    (directory / "outputs").touch()
    plain, bound = wire.shutil.rmtree, []

    def bind_and_remove(path: str, **options: Any) -> None:
        with pytest.raises(FileNotFoundError):
            (directory / "requests").touch()
        bound.append(path)
        plain(path, **options)

    monkeypatch.setattr(wire.shutil, "rmtree", bind_and_remove)
    wire.remove_directory(str(directory))
    wire.remove_directory(str(directory))
    assert len(bound) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_start_that_a_signal_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]) -> None:
    directories = []

    def popen(command: list[str], **options: Any) -> None:
        directories.append(Path(command[-1]))
        assert directories[0].is_dir()
        raise stop

    monkeypatch.setattr(local.subprocess, "Popen", popen)
    with pytest.raises(stop):
        Child("played_child", Start("hello"), Said, what="the player")
    assert not directories[0].exists()
