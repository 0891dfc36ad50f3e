"""The frontend's end of an engine core in a process of its own: start it, talk to it, notice its death, stop it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import zmq

from engine.types import wire
from engine.types.errors import EngineDeadError, EngineError, rebuild_error
from engine.types.messages import Failed, FromCore, ProcessStart, Ready, Shutdown, ToCore
from engine.types.start import CoreStart, WorkerReady

MODULE = "engine.loop.process"
LONGEST_SOCKET_PATH = 100
"""Unix socket paths end at 107 bytes."""


class CoreProcess:
    """An engine core behind two ZeroMQ sockets in a private directory.

    `send` may be called from one thread at a time. What comes back is handed to `on_message` on a thread of this
    object's own, until `on_death` is called there, once, with the error to show, if the process ends unasked.
    """

    def __init__(self, start: CoreStart) -> None:
        self._directory = _socket_directory()
        requests, outputs = (f"ipc://{self._directory}/{name}" for name in ("requests", "outputs"))
        self._context = zmq.Context()
        self._requests = self._socket(zmq.PUSH, requests)
        self._outputs = self._socket(zmq.PULL, outputs)
        self._decode: Callable[[bytes], FromCore] = wire.decoder(FromCore).decode
        self._stopping, self._closing = threading.Event(), threading.Event()
        self._starting = threading.Lock()  # held while `wait_ready` reads the socket that `shutdown` closes
        self._ready = False
        self._reader: threading.Thread | None = None
        # A session of its own: Ctrl-C in a terminal reaches the frontend alone, which then stops the core in order.
        self._process = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, start_new_session=True)
        message = ProcessStart(core=start, requests=requests, outputs=outputs, directory=self._directory)
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
        while not self._stopping.is_set():
            message = self._receive()
            if isinstance(message, Ready):
                ready = message.worker
                break
            if isinstance(message, Failed):
                return rebuild_error(message.error)
            if message is None and self._process.poll() is not None:
                return self._death("starting")
        # A message sent before the core's end of the socket is connected would be dropped, as if the core were dead.
        while not self._stopping.is_set():
            if self._requests.poll(100, zmq.POLLOUT):
                self._ready = True
                return ready
            if self._process.poll() is not None:
                return self._death("starting")
        return EngineDeadError("start the engine core's process", "it was shut down while it started")

    def listen(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        """Begin to hand over what comes, on a thread of this object's own."""
        self._reader = threading.Thread(target=self._read_loop, args=(on_message, on_death), name="core", daemon=True)
        self._reader.start()

    def send(self, message: ToCore) -> None:
        """Queue a message; never blocks. A dead core swallows it (`on_death` has told, or will tell)."""
        with contextlib.suppress(zmq.Again):
            self._requests.send(wire.encode(message), zmq.NOBLOCK)

    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        """The first half of `shutdown`, which does not wait. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._ready:
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
            self._process.kill()
            self._process.wait()
        self._close_pipe()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        with self._starting:
            pass
        self._requests.close(linger=0)
        self._outputs.close(linger=0)
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
        if not self._outputs.poll(100):
            return None
        return self._decode(self._outputs.recv())

    def _read_loop(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        while not self._stopping.is_set():
            message = self._receive()
            if isinstance(message, Failed):
                return on_death(rebuild_error(message.error))
            if message is not None:
                on_message(message)
            elif self._process.poll() is not None and not self._stopping.is_set():
                return on_death(self._death("running"))

    def _death(self, state: str) -> EngineDeadError:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDeadError(
            f"the engine core's process ended while {state}", how, "its log says why; start it again"
        )


def _socket_directory() -> str:
    directory = tempfile.mkdtemp(prefix="engine-")
    if len(os.fsencode(directory)) > LONGEST_SOCKET_PATH - len("/requests"):
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="engine-", dir="/tmp")
    return directory
