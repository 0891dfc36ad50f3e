"""The frontend's end of an engine core in a process of its own: start it, talk to it, notice its death, stop it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import psutil
import zmq

from engine.frontend.os_processes import OSProcesses
from engine.types import wire
from engine.types.errors import EngineDeadError, EngineError, rebuild_error
from engine.types.messages import Failed, FromCore, ProcessStart, Ready, Shutdown, ToCore
from engine.types.private_directory import make_private_directory
from engine.types.start import CoreStart, WorkerReady

MODULE = "engine.loop.process"
POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 1.0
LEAVE_SECONDS = 2.0
"""How long the processes that a core started get to leave by themselves."""
STACK_SECONDS = 0.5
"""How long a hung core gets to write down where it hangs."""


class CoreProcess:
    """An engine core behind two ZeroMQ sockets in a private directory.

    `send` may be called from one thread at a time. What comes back is read from `outputs`, by `ProcessClient`.

    Raises EngineDeadError where the process cannot be started.
    """

    client = 0
    """Its number for the core: who started it."""

    def __init__(self, start: CoreStart) -> None:
        self._directory = make_private_directory("engine-", len("requests"), "the engine core's process")
        self._step_timeout = start.step_timeout
        requests, outputs = (f"ipc://{self._directory}/{name}" for name in ("requests", "outputs"))
        self._context = zmq.Context()
        try:
            self._requests = self._socket(zmq.PUSH, requests)
            self.outputs = self._socket(zmq.PULL, outputs)
            # A session of its own: Ctrl-C in a terminal reaches the frontend alone, which then stops the core in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, self._directory], stdin=subprocess.PIPE, start_new_session=True
            )
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise EngineDeadError(
                "start the engine core's process", str(error), "the system's limits may say why"
            ) from error
        self.decode: Callable[[bytes], FromCore] = wire.decoder(FromCore).decode
        self.stopping, self._closing = threading.Event(), threading.Event()
        self._starting = threading.Lock()  # held while `wait_ready` reads the socket that `shutdown` closes
        self._ready = self._hung = False
        self._family: OSProcesses | None = None
        message = ProcessStart(core=start, requests=requests, outputs=outputs)
        try:
            assert self._process.stdin is not None
            wire.write_frame(self._process.stdin, wire.encode(message))
        except OSError as error:
            self.shutdown()
            raise EngineDeadError("start the engine core's process", f"it ended at once ({error})") from error

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

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
        while not self.stopping.is_set():
            try:
                message = self._receive()
            except msgspec.DecodeError as error:
                return self.end_unreadable(error)
            if isinstance(message, Ready):
                ready = message.worker
                break
            if isinstance(message, Failed):
                return rebuild_error(message.error)
            if message is None and self._process.poll() is not None and not self.stopping.is_set():
                return self._last_words() or self._death("starting")
        # A message sent before the core's end of the socket is connected would be dropped, as if the core were dead.
        while not self.stopping.is_set():
            if self._requests.poll(100, zmq.POLLOUT):
                self._ready, self._family = True, OSProcesses(self._process.pid)
                return ready
            if self._process.poll() is not None and not self.stopping.is_set():
                return self._death("starting")
        return EngineDeadError("start the engine core's process", "it was shut down while it started")

    def send(self, message: ToCore) -> None:
        """Queue a message; never blocks. A dead core swallows it (`on_death` has told, or will tell)."""
        with contextlib.suppress(zmq.Again):
            self._requests.send(wire.encode(message), zmq.NOBLOCK)

    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def stopped(self) -> bool:
        """Whether the system has it, or a worker of its, stopped."""
        return self._family is not None and self._family.stopped()

    def ask_to_stop(self) -> None:
        """The first half of `shutdown`, which does not wait. Idempotent."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self._hung:
            self._kill()
        elif self._ready:
            self.send(Shutdown())
        else:  # it loads, and reads no messages yet; it leaves at once when the pipe ends
            self._close_pipe()

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ask the process to stop, wait, kill it if it does not, and remove the sockets. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.ask_to_stop()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._close_pipe()
        with self._starting:
            pass
        self._requests.close(linger=0)
        self.outputs.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def _receive(self) -> FromCore | None:
        if not self.outputs.poll(round(POLL_SECONDS * 1000)):
            return None
        return self.decode(self.outputs.recv())

    def ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def why_ended(self) -> EngineError:
        """Of a process that has; may wait a moment for its last words."""
        return self._last_words() or self._death("running")

    def end_hung(self) -> EngineDeadError:
        """The core is silent: let it say where it hangs, and end it. Nobody will hear from it again."""
        self._hung, state = True, ""
        with contextlib.suppress(psutil.Error):
            state = f", {psutil.Process(self._process.pid).status()}"
            if hasattr(signal, "SIGUSR1"):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(STACK_SECONDS)
        self._kill()
        return EngineDeadError(
            "wait for the engine core",
            f"no sign of life for {self._step_timeout:g} s (process {self._process.pid}{state}); it was ended",
            "its log says where it hung; if one step may take that long: --step-timeout",
        )

    def _kill(self) -> None:
        """End the process. Those that it started see that, and leave in order; but not where they are stopped."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        for child in psutil.wait_procs(children, LEAVE_SECONDS)[1]:
            with contextlib.suppress(psutil.Error):
                child.kill()

    def end_unreadable(self, error: Exception) -> EngineDeadError:
        """The core sends what cannot be read: end it."""
        self._hung = True
        self._kill()
        return EngineDeadError(
            "read what the engine core sent",
            f"{error} (process {self._process.pid}); it was ended",
            "use the same version of Engine in all processes, and report this",
        )

    def _last_words(self) -> EngineError | None:
        """What a process that left by itself sent before: it may still be on its way when the process has ended."""
        with contextlib.suppress(msgspec.DecodeError):
            while self._process.returncode >= 0 and self.outputs.poll(round(LAST_WORDS_SECONDS * 1000)):
                message = self.decode(self.outputs.recv())
                if isinstance(message, Failed):
                    return rebuild_error(message.error)
        return None

    def _death(self, state: str) -> EngineDeadError:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDeadError(
            f"the engine core's process ended while {state}", how, "its log says why; start it again"
        )
