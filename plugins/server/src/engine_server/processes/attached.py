"""Engine cores that another process has started: an API process beside others reaches them by sockets of its own.

The process that started them says when one is ready, when it has died, and what comes in its place. Everything else
goes between this process and the core, without a detour.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec
import zmq

from engine.embedding import OSProcesses, ProcessClient
from engine.types import wire
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import FromCore, ToCore
from engine.types.start import CoreStart, WorkerReady

POLL_SECONDS = 0.1


class CorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a core that is ready can be reached.

    Args:
        dp_rank: its data-parallel rank.
        pid: of its process.
        requests, outputs: addresses, which the client binds.
        worker: what it told when it was ready.
    """

    dp_rank: int
    pid: int
    requests: str
    outputs: str
    worker: WorkerReady


class AttachedCore:
    """One of them. See `engine.frontend.process_client.Link`.

    `attach` and `died` are called by whoever hears the process that started the core, in any thread; `wait_ready`
    waits for the former.
    """

    def __init__(self, client: int) -> None:
        self.client = client
        self.decode: Callable[[bytes], FromCore] = wire.decoder(FromCore).decode
        self.stopping = threading.Event()
        self._place: CorePlace | None = None
        self._placed, self._closed = threading.Event(), False
        self._closing = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._error: EngineError | None = None
        self._family: OSProcesses | None = None

    @property
    def pid(self) -> int:
        """Of its process; 0 while it is not known."""
        return 0 if self._place is None else self._place.pid

    def attach(self, place: CorePlace) -> None:
        """The core is ready, and can be reached there."""
        self._place = place
        self._placed.set()

    def died(self, error: EngineError) -> None:
        """The core has ended."""
        self._error = error
        self._placed.set()

    def wait_ready(self) -> WorkerReady:
        """Wait until the core is ready and connected. Raises EngineError where it died, or `shutdown` was called."""
        self._placed.wait()
        with self._closing:
            if self._error is not None or self._closed or self._place is None:
                raise self._error or EngineDeadError("reach the engine core", "it was given up while it started")
            self._context = zmq.Context()
            self._requests = self._bound(zmq.PUSH, self._place.requests)
            self.outputs = self._bound(zmq.PULL, self._place.outputs)
            # A message sent before the core's end of the socket is connected would be dropped, as if it were dead.
            while not self._requests.poll(round(POLL_SECONDS * 1000), zmq.POLLOUT):
                if self.ended():
                    raise self.why_ended()
                if self.stopping.is_set():
                    raise EngineDeadError("reach the engine core", "it was given up while it started")
            self._family = OSProcesses(self._place.pid)
        return self._place.worker

    def send(self, message: ToCore) -> None:
        """Queue a message; never blocks. A dead core swallows it."""
        with contextlib.suppress(zmq.Again):
            self._requests.send(wire.encode(message), zmq.NOBLOCK)

    def alive(self) -> bool:
        """False once it has ended."""
        return self._error is None

    def stopped(self) -> bool:
        """Whether the system has it, or a worker of its, stopped."""
        return self._family is not None and self._family.stopped()

    def ended(self) -> bool:
        """Whether whoever started it said that it has."""
        return self._error is not None

    def why_ended(self) -> EngineError:
        """What it ended with."""
        assert self._error is not None
        return self._error

    def end_hung(self) -> EngineError:
        """Never asked for: there is no time limit here."""
        raise AssertionError("whoever started a core finds out whether it hangs")

    def end_unreadable(self, error: Exception) -> EngineError:
        """The core sends what cannot be read: for this process it is dead."""
        return EngineDeadError(
            "read what the engine core sent",
            str(error),
            "use the same version of Engine in all processes, and report this",
        )

    def ask_to_stop(self) -> None:
        """Give the connection up; the core goes on. Does not wait. Idempotent."""
        self.stopping.set()
        self._placed.set()

    def shutdown(self) -> None:
        """The same, and free the sockets. Idempotent."""
        self._closed = True
        self.ask_to_stop()
        with self._closing:
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket


class AttachedCores:
    """All cores of one engine, as the process that started them tells of them.

    Args:
        client: this process's number, see `engine.types.messages.Attach`.
        size: how many cores they are.
    """

    def __init__(self, client: int, size: int) -> None:
        self._client = client
        self._cores: list[AttachedCore | None] = [None] * size
        self._places: list[CorePlace | None] = [None] * size  # of cores that nobody has asked for yet
        self._lock = threading.Lock()  # those that come in dead ones' places are asked for in threads

    def connect(self, start: CoreStart) -> ProcessClient:
        """The client of this rank's core; again where one has died: of the next that stands."""
        dp_rank, core = start.worker.data_parallel_rank, AttachedCore(self._client)
        with self._lock:
            self._cores[dp_rank] = core
            place, self._places[dp_rank] = self._places[dp_rank], None
        if place is not None:
            core.attach(place)
        return ProcessClient(core, dp_rank)

    def ready(self, place: CorePlace) -> None:
        """A core stands, the first of its rank or one in the place of a dead one."""
        with self._lock:
            core = self._cores[place.dp_rank]
            if core is None or core.pid or core.ended():
                self._places[place.dp_rank] = place
                return
        core.attach(place)

    def died(self, dp_rank: int, error: EngineError) -> None:
        """The core that stands there has ended."""
        with self._lock:
            place, self._places[dp_rank] = self._places[dp_rank], None
            core = self._cores[dp_rank]
        if place is None and core is not None:
            core.died(error)
