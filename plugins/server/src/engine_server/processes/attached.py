"""Engine cores that another process has started: an API process beside others reaches them by sockets of its own.

The process that started them says when one is ready, when it has died, and what comes in its place. Everything else
goes between this process and the core, without a detour.
"""

from __future__ import annotations

import threading
import time

import msgspec

from engine.process.wire import Inbox, Outbox
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import FromCore, Ready, ToCore
from engine.types.start import CoreStart, WorkerReady
from engine_kit.process_client import ProcessClient

POLL_SECONDS = 0.1


class CorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a core that is ready can be reached.

    Args:
        dp_rank: its data-parallel rank.
        pid: of its process.
        requests: the address that the core reads from; outputs: the one that it writes to.
        worker: what was told when it was ready.
    """

    dp_rank: int
    pid: int
    requests: str
    outputs: str
    worker: WorkerReady


class AttachedCore:
    """One of them, as `engine.process.child.Child` is of a core that this process has started: whoever started it finds
    out whether it hangs, and calls `attach` when it is ready and `died` when it has ended, in any thread."""

    remote = False

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.failed = False
        self._place: CorePlace | None = None
        self._placed = threading.Event()
        self._inbox: Inbox[FromCore] | None = None
        self._outbox: Outbox | None = None
        self._error: EngineError | None = None
        self._heard = time.monotonic()

    def attach(self, place: CorePlace) -> None:
        self._place = place
        self._placed.set()

    def died(self, error: EngineError) -> None:
        self._error = error
        self._placed.set()

    @property
    def pid(self) -> int:
        return 0 if self._place is None else self._place.pid

    @property
    def alive(self) -> bool:
        return self._error is None

    @property
    def silence(self) -> float:
        """Seconds without a message: one that has nothing to do says nothing here."""
        return time.monotonic() - self._heard

    def send(self, message: ToCore) -> None:
        assert self._outbox is not None
        self._outbox.put(message)

    def fileno(self) -> int:
        assert self._inbox is not None
        return self._inbox.fileno()

    def take(self) -> FromCore | None:
        """The next message, if one is there: the first is that it is ready."""
        if self._inbox is None:
            if self._place is None or self._error is not None:
                return None
            self._outbox = Outbox(self._place.requests)
            self._inbox = Inbox(FromCore, self._place.outputs)
            return Ready(self._place.worker)
        try:
            message = self._inbox.take()
        except msgspec.DecodeError as error:  # for this process it is dead
            remedy = "use the same version of Engine in all processes, and report this"
            self._error = EngineDeadError("read what the engine core sent", str(error), remedy)
            self.failed = True
            return None
        if message is not None:
            self._heard = time.monotonic()
        return message

    def receive(self, timeout: float) -> FromCore | None:
        """The next message, waited for so many seconds; None where none comes. Raises `death()` where it is lost."""
        deadline = time.monotonic() + timeout
        while True:
            if (message := self.take()) is not None:
                return message
            if self.lost():
                raise self.death()
            left = deadline - time.monotonic()
            if left <= 0 or self.stopping.is_set():
                return None
            if self._inbox is None:
                self._placed.wait(left)
            else:
                self._inbox.wait(min(left, POLL_SECONDS))

    def lost(self) -> bool:
        return self._error is not None

    def death(self) -> EngineError:
        assert self._error is not None
        return self._error

    def ask_to_stop(self) -> None:
        """Give the connection up; the core goes on. Idempotent."""
        self.stopping.set()
        self._placed.set()

    def end(self, grace: float) -> int:
        self.ask_to_stop()
        return 0

    def close(self) -> None:
        if self._inbox is not None and self._outbox is not None:
            self._inbox.close()
            self._outbox.drop()
            self._inbox = self._outbox = None


class AttachedCores:
    """All cores of one engine, as the process that started them tells of them. `client` is this process's number for
    them, see `engine.types.messages.Attach`."""

    def __init__(self, client: int, size: int) -> None:
        self._client = client
        self._cores: list[AttachedCore | None] = [None] * size
        self._places: list[CorePlace | None] = [None] * size  # of cores that nobody has asked for yet
        self._lock = threading.Lock()  # those that come in dead ones' places are asked for in threads

    def connect(self, start: CoreStart) -> ProcessClient:
        """The client of this rank's core; again where one has died: of the next that stands."""
        dp_rank, core = start.worker.data_parallel_rank, AttachedCore()
        with self._lock:
            self._cores[dp_rank] = core
            place, self._places[dp_rank] = self._places[dp_rank], None
        if place is not None:
            core.attach(place)
        return ProcessClient(core, dp_rank, self._client)

    def ready(self, place: CorePlace) -> None:
        """A core stands, the first of its rank or one in the place of a dead one."""
        with self._lock:
            core = self._cores[place.dp_rank]
            if core is None or core.pid or core.lost():
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
