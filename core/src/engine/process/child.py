"""A process that the engine starts: one way to start it, to speak to it, to see that it lives, and to end it.

On the other side `engine.process.run` takes the start message and watches that this process lives.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import psutil
import zmq

from engine.process.local import ENDED_SECONDS, LEAVE_SECONDS, LocalProcess, NodeProcess, out_of_memory_kills, stopped
from engine.process.wire import Hello, Inbox, Link, Outbox, encode_to_send, opening
from engine.types.errors import EngineDeadError, EngineError, rebuild_error
from engine.types.messages import Beat, Failed, Shutdown

T = TypeVar("T")

LOOK_SECONDS = 0.1
"""How often it is looked whether a child that says nothing lives."""
LONGEST_LOOK = 2.0
"""What one look counts at most as silence: a machine that slept, or a parent that was stopped, has not listened."""
LAST_WORDS_SECONDS = 1.0


class Elsewhere(NamedTuple):
    """How a child is started that need not run on this machine.

    Attributes:
        spawn: starts it, see `engine.interfaces.nodes.Nodes.spawn`: of a module, its start, and what it is.
        here, there: addresses of this machine and of the child's; "" where both are one.
        timeout: seconds after which a connection without a sign of life is lost.
    """

    spawn: Callable[[str, bytes, str], NodeProcess]
    here: str = ""
    there: str = ""
    timeout: float = math.inf


class Child(Generic[T]):
    """`python -m MODULE DIRECTORY`, which calls `engine.process.run.run`. On this machine it is spoken to over Unix
    sockets, elsewhere over TCP, encrypted by keys that both have of its start message.

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
        home: where its directory is made, see `private_directory`; of this machine.
        elsewhere: None: it runs on this machine.

    Attributes:
        inbox: what it is heard with.
        directory: private to it, on its machine. Sockets lie in it; it is removed when either ends.
        remote: it is on another machine, whose process ids say nothing here.
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
        home: str = "",
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._what = what
        self._silence_limit = silence
        self._patience = patience
        self._owner = os.getpid()
        self.stopping = threading.Event()
        self.ready = False
        self.failed = False
        self.remote = elsewhere is not None and bool(elsewhere.there)
        self._garbled = False
        self._cut = False
        self._error: EngineError | None = None
        self._heard = True
        self._looked = time.monotonic()
        self._silence = 0.0
        self._kills = out_of_memory_kills()
        self._sending = threading.Lock()
        self._outbox: Outbox | None = None
        self._early: list[bytes] = []  # told before it was heard where it listens
        self._used = contextlib.ExitStack()  # sockets, and what is left of the process
        kinds = reply | Beat | Failed | Hello
        link = Link()
        try:
            if elsewhere is not None and self.remote:
                link, secret = Link.between(elsewhere.there, elsewhere.timeout)
                self.inbox: Inbox[T | Beat | Failed | Hello] = Inbox(kinds, f"tcp://{elsewhere.here}:*", secret)
                self._used.callback(self.inbox.close)
                link = msgspec.structs.replace(link, outputs=self.inbox.address)
            self._link = link
            if elsewhere is None:
                self._process: NodeProcess = LocalProcess(module, opening(link, start), what, pass_fds, home)
            else:
                self._process = elsewhere.spawn(module, opening(link, start), what)
        except zmq.ZMQError as error:
            self._used.close()
            raise EngineDeadError(f"start {what}", str(error), "the system's limits may say why") from error
        except BaseException:
            self._used.close()
            raise
        self.directory = self._process.directory
        self._used.callback(self._process.close)
        if self.remote:
            return
        try:
            self.inbox = Inbox(kinds, f"ipc://{self.directory}/outputs")
            self._used.callback(self.inbox.close)
            self._connect(f"ipc://{self.directory}/requests")
        except BaseException as error:
            self.end(0)
            self.close()
            if not isinstance(error, (OSError, zmq.ZMQError)):
                raise
            raise EngineDeadError(f"start {what}", str(error), "the system's limits may say why") from error

    # -- speaking ------------------------------------------------------------------------------------------------------
    def send(self, message: Any) -> None:
        """Queue a message; never blocks. A dead child swallows it."""
        self.send_encoded(encode_to_send(message))

    def send_encoded(self, data: bytes) -> None:
        """Queue what `wire.encode` made."""
        with self._sending:  # whoever stops it may be another than who speaks to it
            if self._outbox is None:
                self._early.append(data)
            else:
                self._outbox.put_encoded(data)

    def _connect(self, address: str) -> None:
        """Tell it what was to be told, now that it is known where it listens."""
        with self._sending:
            self._outbox = Outbox(address, self._link.orders_key, self._link.timeout)
            self._used.callback(self._outbox.drop)
            for data in self._early:
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
            elif isinstance(message, Hello):
                self._connect(message.orders)
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
        """See `NodeProcess.poll`."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def describe(self) -> str:
        """See `NodeProcess.describe`."""
        return self._process.describe()

    @property
    def stopped(self) -> bool:
        """See `engine.process.local.stopped`; False for one elsewhere."""
        return not self.remote and stopped(self.pid)

    @property
    def cut(self) -> bool:
        """The connection to one elsewhere was lost."""
        with self._sending:
            self._cut = self._cut or (self._outbox is not None and self._outbox.lost())
        return self._cut

    def lost(self) -> bool:
        """Whether nothing is to be expected of it any more. To be asked now and then while nothing comes: it is
        silent for the time between two of these looks."""
        now = time.monotonic()
        if self._heard or not (self.ready or self.stopped):
            self._silence = 0.0
        else:
            self._silence += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        heard, self._heard = self._heard, False  # of one that has ended, there may be more to hear
        return self.failed or self._silence >= self._silence_limit or not (heard or (self.alive and not self.cut))

    def death(self) -> EngineError:
        """Why it is lost; ends it where it lives. May take seconds: for its last words, and to leave."""
        if self._garbled:
            self.kill()
        elif self._error is None and (self.cut or not self.alive):
            self._hear_last_words()
        if self._error is None:
            self._error = self._ended() if self.cut or not self.alive else self._hung()
        return self._error

    def _hear_last_words(self) -> None:
        """What a process that left by itself sent before may still be on its way, and how one elsewhere ended."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while (self.code or 0) >= 0 and not self.failed and (left := deadline - time.monotonic()) > 0:
            if self.inbox.wait(min(left, LOOK_SECONDS)):
                self.take()
            elif self.cut and self.code is not None:
                break

    def _ended(self) -> EngineDeadError:
        code, how = self.code, self.describe()
        state = "running" if self.ready else "starting"
        self.kill()  # or what it has left
        if code is None:
            if self._outbox is not None and not self._outbox.made:
                how += f"; no connection to {self._outbox.address} could be made"
            remedy = "its machine may have gone, or the network: look there, and start it again"
            return EngineDeadError(f"the connection to {self._what} was lost while {state}", how, remedy)
        if not self.remote:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL and not self.remote and out_of_memory_kills() > self._kills:
            how += ", and the system has run out of memory"
        return EngineDeadError(f"{self._what}'s process ended while {state}", how, "its log says why; start it again")

    def _hung(self) -> EngineDeadError:
        """It is silent: let it say where it hangs, and end it."""
        how = self.describe()
        self._process.kill(hangs=True)
        return EngineDeadError(
            f"wait for {self._what}",
            f"no sign of life for {self._silence_limit:g} s ({how}); it was ended",
            f"its log says where it hung; if it may be silent for so long, raise {self._patience}",
        )

    def _unreadable(self, error: msgspec.DecodeError) -> None:
        self._garbled = True
        found = f"{error} ({self.describe()}); it was ended"
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
            self._process.let_go()

    def wait(self, timeout: float) -> bool:
        """Whether it ends by itself within so many seconds."""
        deadline = time.monotonic() + timeout
        while self.alive and time.monotonic() < deadline:
            time.sleep(ENDED_SECONDS)
        return not self.alive

    def end(self, grace: float) -> int:
        """Ask it to stop, wait so many seconds, and kill it if it has not. Returns its exit code. Idempotent."""
        if os.getpid() != self._owner:  # a fork of the owner has a copy of this object
            return 0
        self.ask_to_stop()
        if self.cut or not self.wait(grace):
            self.kill()
        self._process.let_go()
        return self.code or 0

    def kill(self) -> None:
        """End it, with those that it started."""
        self._process.kill()
        if not self.cut:  # else nobody may be there who would tell
            self.wait(LEAVE_SECONDS)

    def close(self) -> None:
        """Free sockets and directory, once it has ended and nobody receives any more. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._sending:
            self._outbox = None
        self._used.close()


class ProcessTree:
    """A process that is ready, and those that it has started by then, as the operating system sees them.

    A step may take as long as it takes: a process that computes, or waits for a device, is as it should be. One that a
    signal or a debugger has stopped does nothing until it is continued, and only the system knows. So there is no
    thread in the core that would answer in its place, and nothing for the step loop to do.
    """

    def __init__(self, pid: int) -> None:
        self._pids: list[int] = []
        with contextlib.suppress(psutil.Error):
            self._pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]

    def stopped(self) -> bool:
        """Whether one of them is. One look at each: it may be asked with every `/health`."""
        return any(map(stopped, self._pids))  # that one has ended others notice
