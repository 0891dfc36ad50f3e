"""A process that the engine starts: one way to start it, to speak to it, to see that it lives, and to end it.

On the other side `engine.process.run` takes the start message and watches that this process lives.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import psutil
import zmq

from engine.process.wire import Inbox, Outbox, encode, remove_directory, write_frame
from engine.types.errors import EngineDeadError, EngineError, rebuild_error
from engine.types.messages import Beat, Failed, Shutdown

T = TypeVar("T")

LOOK_SECONDS = 0.1
"""How often it is looked whether a child that says nothing lives."""
LONGEST_LOOK = 2.0
"""What one look counts at most as silence: a machine that slept, or a parent that was stopped, has not listened."""
LAST_WORDS_SECONDS = 1.0
LEAVE_SECONDS = 2.0
"""How long the processes that a child started get to leave by themselves."""
STACK_SECONDS = 0.5
"""How long a hung child gets to write down where it hangs."""
LONGEST_SOCKET_PATH = 107
"""Bytes; what comes after is cut off by the system, or refused."""
LONGEST_NAME = len("requests-000-0000000")
"""Of a socket in a private directory."""

_STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


class Child(Generic[T]):
    """`python -m MODULE DIRECTORY`, in a session of its own: Ctrl-C in a terminal reaches this process alone, which
    then stops its children in order. `module` calls `engine.process.run.run`.

    Any thread may send, ask it to stop, end and kill it; one at a time may receive. What it says is heard until it is
    `lost`: it ended, failed, sent what cannot be read, or said nothing for `silence` seconds. `death` then says who is
    to blame.

    Args:
        module: to run.
        start: the start message.
        reply: the type of what it says: a union of tagged structs. `Beat` and `Failed` are understood besides.
        what: it is, for errors: "the engine core".
        silence: seconds; a child that says nothing sends a `Beat` now and then.
        patience: the flag that allows it more, for errors.
        pass_fds: descriptors that it inherits.

    Attributes:
        inbox: what it is heard with.
        directory: private to both. Sockets lie in it; it is removed when either ends.
        ready: it has said something, and hears what is sent.
        stopping: `ask_to_stop` was called.
        failed: it said `Failed`, or what cannot be read. Nothing is heard of it any more.

    Raises EngineDeadError where it cannot be started.
    """

    def __init__(
        self,
        module: str,
        start: Any,
        reply: Any,
        *,
        what: str,
        silence: float = math.inf,
        patience: str = "--step-timeout",
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._what = what
        self._silence_limit = silence
        self._patience = patience
        self._owner = os.getpid()
        self.directory = _private_directory(what)
        self.stopping = threading.Event()
        self.ready = False
        self.failed = False
        self._garbled = False
        self._error: EngineError | None = None
        self._heard = True
        self._looked = time.monotonic()
        self._silence = 0.0
        self._kills = _out_of_memory_kills()
        self._sending = threading.Lock()
        self._used = contextlib.ExitStack()  # sockets and directory
        self._used.callback(remove_directory, self.directory)
        try:
            self.inbox: Inbox[T | Beat | Failed] = Inbox(reply | Beat | Failed, f"ipc://{self.directory}/outputs")
            self._used.callback(self.inbox.close)
            self._outbox = Outbox(f"ipc://{self.directory}/requests")
            self._used.callback(self._outbox.drop)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, self.directory],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise EngineDeadError(f"start {what}", str(error), "the system's limits may say why") from error
        except BaseException:  # a signal: what is half started sees the end of its pipe
            self.close()
            raise
        try:
            assert self._process.stdin is not None
            write_frame(self._process.stdin, encode(start))
        except OSError as error:
            self.end(0)
            self.close()
            raise EngineDeadError(f"start {what}", f"it ended at once ({error})") from error

    # -- speaking ------------------------------------------------------------------------------------------------------
    def send(self, message: Any) -> None:
        """Queue a message; never blocks. A dead child swallows it."""
        with self._sending:  # whoever stops it may be another than who speaks to it
            self._outbox.put(message)

    def send_encoded(self, data: bytes) -> None:
        """Queue what `wire.encode` made."""
        with self._sending:
            self._outbox.put_encoded(data)

    def fileno(self) -> int:
        """For event loops: see `Inbox.fileno`."""
        return self.inbox.fileno()

    def take(self) -> T | None:
        """The next message, if one is there. It may be that nothing comes any more: see `lost`."""
        while not self.failed:
            try:
                message = self.inbox.take()
            except msgspec.DecodeError as error:
                self._unreadable(error)
                break
            if message is None:
                break
            self._heard = True
            if isinstance(message, Failed):
                self._fail(rebuild_error(message.error))
            elif not isinstance(message, Beat):
                self.ready = True
                return message
        return None

    def receive(self, timeout: float) -> T | None:
        """The next message, waited for so many seconds; None where none comes. Raises `death()` where it is lost."""
        deadline = time.monotonic() + timeout
        while True:
            if (message := self.take()) is not None:
                return message
            if self.lost():
                raise self.death()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.inbox.wait(min(left, LOOK_SECONDS))

    # -- living --------------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silence(self) -> float:
        """Seconds without a message, as the looks at it (`lost`) found it."""
        return self._silence

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def lost(self) -> bool:
        """Whether nothing is to be expected of it any more. To be asked now and then while nothing comes: it is
        silent for the time between two of these looks."""
        now = time.monotonic()
        if self._heard or not self.ready:
            self._silence = 0.0
        else:
            self._silence += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        heard, self._heard = self._heard, False  # of one that has ended, there may be more to hear
        return self.failed or self._silence >= self._silence_limit or not (heard or self.alive)

    def death(self) -> EngineError:
        """Why it is lost; ends it where it lives. May take seconds: for its last words, and to leave."""
        if self._garbled:
            self.kill()
        elif self._error is None and not self.alive:
            self._hear_last_words()
        if self._error is None:
            self._error = self._hung() if self.alive else self._ended()
        return self._error

    def _hear_last_words(self) -> None:
        """What a process that left by itself sent before may still be on its way."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._process.returncode >= 0 and not self.failed and (left := deadline - time.monotonic()) > 0:
            if self.inbox.wait(left):
                self.take()

    def _ended(self) -> EngineDeadError:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL and _out_of_memory_kills() > self._kills:
            how += ", and the system has run out of memory"
        state = "running" if self.ready else "starting"
        return EngineDeadError(f"{self._what}'s process ended while {state}", how, "its log says why; start it again")

    def _hung(self) -> EngineDeadError:
        """It is silent: let it say where it hangs, and end it."""
        state = ""
        with contextlib.suppress(psutil.Error):
            state = f", {psutil.Process(self.pid).status()}"
            if hasattr(signal, "SIGUSR1"):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(STACK_SECONDS)
        self.kill()
        return EngineDeadError(
            f"wait for {self._what}",
            f"no sign of life for {self._silence_limit:g} s (process {self.pid}{state}); it was ended",
            f"its log says where it hung; if it may be silent for so long, raise {self._patience}",
        )

    def _unreadable(self, error: msgspec.DecodeError) -> None:
        self._garbled = True
        found = f"{error} (process {self.pid}); it was ended"
        remedy = "use the same version of Engine in all processes, and report this"
        self._fail(EngineDeadError(f"read what {self._what} sent", found, remedy))

    def _fail(self, error: EngineError) -> None:
        self.failed = True
        self._error = error

    # -- ending --------------------------------------------------------------------------------------------------------
    def ask_to_stop(self) -> None:
        """The first half of `end`, which does not wait. Idempotent."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self.ready:
            self.send(Shutdown())
        else:  # it reads no messages yet; it leaves at once when the pipe ends
            self._close_pipe()

    def wait(self, timeout: float) -> bool:
        """Whether it ends by itself within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return not self.alive

    def end(self, grace: float) -> int:
        """Ask it to stop, wait so many seconds, and kill it if it has not. Returns its exit code. Idempotent."""
        if os.getpid() != self._owner:  # a fork of the owner has a copy of this object
            return 0
        self.ask_to_stop()
        if not self.wait(grace):
            self.kill()
        self._close_pipe()
        return self._process.wait()

    def kill(self) -> None:
        """End it. Those that it started see that, and leave in order, or are ended: they may be stopped."""
        children: list[psutil.Process] = []
        if self.alive:  # of one that has ended, another may have the number by now
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        for child in psutil.wait_procs(children, LEAVE_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                child.kill()

    def close(self) -> None:
        """Free sockets and directory, once it has ended and nobody receives any more. Idempotent."""
        if os.getpid() != self._owner:
            return
        self._used.close()

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


class ProcessTree:
    """A process that is ready, and those that it has started by then, as the operating system sees them.

    A step may take as long as it takes: a process that computes, or waits for a device, is as it should be. One that a
    signal or a debugger has stopped does nothing until it is continued, and only the system knows. So there is no
    thread in the core that would answer in its place, and nothing for the step loop to do.
    """

    def __init__(self, pid: int) -> None:
        self._processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self._processes = [process, *process.children(recursive=True)]

    def stopped(self) -> bool:
        """Whether one of them is. One look at each: it may be asked with every `/health`."""
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended, which others notice
                if process.status() in _STOPPED:
                    return True
        return False


def _private_directory(what: str) -> str:
    """A new directory that only this user may enter, for sockets whose names are at most LONGEST_NAME bytes: in the
    system's temporary folder, or in /tmp where that folder's path is too long for sockets. Raises EngineDeadError
    where none can be made: no such folder, not writable, full."""
    try:
        directory = tempfile.mkdtemp(prefix="engine-")
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


def _out_of_memory_kills() -> int:
    """How many processes this machine has ended for want of memory; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat") as vmstat:
        return int(vmstat.read().partition("\noom_kill ")[2].split()[0])
    return 0
