"""The frontend's end of an engine core in a process of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from engine.frontend.loop_listener import LoopListener
from engine.process.child import Child, ProcessTree
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import FromCore, Ready, ToCore
from engine.types.start import CoreStart, WorkerReady

MODULE = "engine.loop.process"
POLL_SECONDS = 0.1


class CoreProcess:
    """An engine core as a child process.

    `send` may be called from one thread at a time. What comes back is handed to `on_message` on a thread of this
    object's own, or in an event loop, until `on_death` is called there, once, with the error to show, if the process
    ends unasked, sends what cannot be read, or is silent for `step_timeout` seconds: a core that goes round says so
    every second.

    Raises EngineDeadError where the process cannot be started.
    """

    def __init__(self, start: CoreStart) -> None:
        self._child: Child[FromCore] = Child(
            MODULE, start, FromCore, what="the engine core", silence=start.step_timeout
        )
        self._starting = threading.Lock()  # held while `wait_ready` reads what `shutdown` closes
        self._closing = threading.Event()
        self._tree: ProcessTree | None = None
        self._reader: threading.Thread | None = None
        self._listener: LoopListener | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def wait_ready(self) -> WorkerReady:
        """Wait until the model is loaded. `shutdown`, from another thread, ends the wait.

        Raises the core's own error, or EngineDeadError where it died or was shut down.
        """
        with self._starting:
            answer = self._wait_ready()
        if isinstance(answer, WorkerReady):
            return answer
        self.shutdown()
        raise answer

    def _wait_ready(self) -> WorkerReady | EngineError:
        while not self._child.stopping.is_set():
            try:
                message = self._child.receive(POLL_SECONDS)
            except EngineError as error:
                if not self._child.stopping.is_set():
                    return error
                break
            if isinstance(message, Ready):
                self._tree = ProcessTree(self.pid)
                return message.worker
        return EngineDeadError("start the engine core's process", "it was shut down while it started")

    def listen(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        """Begin to hand over what comes, on a thread of this object's own."""
        self._reader = threading.Thread(target=self._read, args=(on_message, on_death), name="core", daemon=True)
        self._reader.start()

    def _read(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        while not self._child.stopping.is_set():
            try:
                message = self._child.receive(POLL_SECONDS)
            except EngineError as error:
                return None if self._child.stopping.is_set() else on_death(error)
            if message is not None:
                on_message(message)

    def listen_in(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Sequence[FromCore]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        """As `listen`, in this loop, which runs this thread: see `LoopListener`. Raises NotImplementedError."""
        self._listener = LoopListener(self._child, loop, on_message, on_death)

    def send(self, message: ToCore) -> None:
        """Queue a message; never blocks. A dead core swallows it (`on_death` has told, or will tell)."""
        self._child.send(message)

    def alive(self) -> bool:
        """True while the process runs."""
        return self._child.alive

    def stopped(self) -> bool:
        """Whether the system has it, or a worker of its, stopped."""
        return self._tree is not None and self._tree.stopped()

    def ask_to_stop(self) -> None:
        """The first half of `shutdown`, which does not wait. Idempotent."""
        self._child.ask_to_stop()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ask the process to stop, wait, kill it if it does not, and free what it used. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._child.end(timeout)
        if self._listener is not None:
            self._listener.stop()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        with self._starting:
            self._child.close()
