"""A process as the system of its machine has it: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Protocol

import psutil

from engine.process.wire import remove_directory
from engine.types.errors import EngineDeadError

LEAVE_SECONDS = 2.0
"""How long the processes that a child started get to leave by themselves."""
ENDED_SECONDS = 0.005
"""How often it is looked whether a child has ended."""
STACK_SECONDS = 0.5
"""How long a hung child gets to write down where it hangs."""
LONGEST_SOCKET_PATH = 107
"""Bytes; what comes after is cut off by the system, or refused."""
LONGEST_NAME = len("requests-000-0000000")
"""Of a socket in a private directory."""

_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


class NodeProcess(Protocol):
    """A process that was started, here or on another machine. Any thread may call; nothing blocks but `kill`."""

    pid: int
    """On its machine."""
    directory: str
    """Private to it, on its machine; its argument."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Where its machine was lost, so is the process:
        `engine.interfaces.nodes.NODE_LOST`."""

    def let_go(self) -> None:
        """Close its standard input, which has it leave at once. Idempotent."""

    def kill(self, hangs: bool = False) -> None:
        """End it; those that it started see that. One that `hangs` gets to write down where. Idempotent."""

    def describe(self) -> str:
        """It and its state, for people: "process 123, sleeping"."""

    def close(self) -> None:
        """Free what is left of it, once it has ended. Idempotent."""


class LocalProcess:
    """`python -m MODULE DIRECTORY` on this machine, in a process group of its own: Ctrl-C in a terminal reaches this
    process alone. Not in a session of its own: so the system continues one that is stopped when this process ends,
    however that is, and it sees that it has no parent any more. See `NodeProcess`.

    Args:
        module: to run; it calls `engine.process.run.run`.
        start: what is written to its standard input, which then stays open: see `engine.process.wire.opening`.
        what: it is, for errors: "the engine core".
        pass_fds: descriptors that it inherits.
        home: see `private_directory`.

    Raises EngineDeadError where it cannot be started.
    """

    def __init__(self, module: str, start: bytes, what: str, pass_fds: Sequence[int] = (), home: str = "") -> None:
        self.directory = private_directory(what, home)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, self.directory],
                stdin=subprocess.PIPE,
                process_group=0,
                pass_fds=pass_fds,
            )
        except OSError as error:
            remove_directory(self.directory)
            raise EngineDeadError(f"start {what}", str(error), "the system's limits may say why") from error
        except BaseException:  # a signal: what is half started sees the end of its pipe
            remove_directory(self.directory)
            raise
        self.pid = self._process.pid
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(start)
            self._process.stdin.flush()
        except OSError as error:
            self.kill()
            self.close()
            raise EngineDeadError(f"start {what}", f"it ended at once ({error})") from error

    def poll(self) -> int | None:
        return self._process.poll()

    def let_go(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self, hangs: bool = False) -> None:
        """Those that it started see that, and leave in order, or are ended: they may be stopped."""
        children: list[psutil.Process] = []
        if self.poll() is None:  # of one that has ended, another may have the number by now
            if hangs and hasattr(signal, "SIGUSR1") and not stopped(self.pid):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(STACK_SECONDS)
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(self.pid).children(recursive=True)
        else:  # this process, where it is its system's first, has inherited those whose directories lie in the child's
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if f"{self.directory}/" in " ".join(child.cmdline()):
                        children.append(child)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        until = time.monotonic() + LEAVE_SECONDS
        while not all(map(_ended, children)) and time.monotonic() < until:
            time.sleep(ENDED_SECONDS)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
                child.wait(LEAVE_SECONDS if child.ppid() == os.getpid() else 0)  # nobody else reaps what it inherits

    def describe(self) -> str:
        code = self.poll()
        if code is not None:
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        else:
            try:
                how = psutil.Process(self.pid).status()
            except psutil.Error:
                how = "gone"
        return f"process {self.pid}, {how}"

    def close(self) -> None:
        self.let_go()
        remove_directory(self.directory)


def stopped(pid: int) -> bool:
    """This machine's system has it stopped: whatever it does takes for ever. False for one that has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in _STOPPED
    return False


def _ended(process: psutil.Process) -> bool:
    """Also one that nobody has reaped yet: orphans are the system's first process's, which may take seconds for it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def private_directory(what: str, home: str = "") -> str:
    """A new directory that only this user may enter, for sockets whose names are at most LONGEST_NAME bytes: in `home`
    or the system's temporary folder, or in /tmp where that folder's path is too long for sockets. Raises
    EngineDeadError where none can be made: no such folder, not writable, full."""
    try:
        directory = tempfile.mkdtemp(prefix="engine-", dir=home or None)
        if len(os.fsencode(directory)) + 1 + LONGEST_NAME > LONGEST_SOCKET_PATH:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="engine-", dir="/tmp")
    except OSError as error:
        raise EngineDeadError(
            f"start {what}",
            f"no directory can be made for its sockets: {error}",
            "free space in the temporary folder, or name another one in TMPDIR",
        ) from error
    return directory


def out_of_memory_kills() -> int:
    """How many processes this machine has ended for want of memory; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat") as vmstat:
        return int(vmstat.read().partition("\noom_kill ")[2].split()[0])
    return 0
