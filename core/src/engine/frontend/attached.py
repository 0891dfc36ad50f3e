"""Engine cores that another process has started: an API process beside others reaches them by sockets of its own.

The process that started them says when one is ready, when it has died, and what comes in its place. Everything else
goes between this process and the core, without a detour.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from engine.frontend.launch import Launch
from engine.frontend.loop_listener import LoopListener
from engine.process.child import ProcessTree
from engine.process.link import Inbox, Outbox
from engine.types.errors import EngineDeadError, EngineError, ManifestError
from engine.types.messages import FromCore, ToCore
from engine.types.start import CoreStart, WorkerReady

POLL_SECONDS = 0.1


class CorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a core that is ready can be reached.

    Args:
        rank: its number.
        pid: of its process.
        requests: the address that the core reads from; outputs: the one that it writes to.
        worker: what it told when it was ready.
    """

    rank: int
    pid: int
    requests: str
    outputs: str
    worker: WorkerReady


class AttachedCore:
    """One of them. See `engine.frontend.core_ranks.Core`, and `engine.frontend.loop_listener.Heard`.

    `attach` and `died` are called by whoever hears the process that started the core, in any thread; `wait_ready`
    waits for the former.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.failed = False
        self._place: CorePlace | None = None
        self._placed, self._closed = threading.Event(), False
        self._closing = threading.Lock()
        self._inbox: Inbox[FromCore] | None = None
        self._outbox: Outbox | None = None
        self._error: EngineError | None = None
        self._tree: ProcessTree | None = None
        self._listener: LoopListener | None = None
        self._reader: threading.Thread | None = None

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
            self._outbox = Outbox(self._place.requests)
            self._inbox = Inbox(FromCore, self._place.outputs)
            self._tree = ProcessTree(self._place.pid)
        return self._place.worker

    def listen(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        """Begin to hand over what comes, on a thread of this object's own."""
        self._reader = threading.Thread(target=self._read, args=(on_message, on_death), name="core", daemon=True)
        self._reader.start()

    def listen_in(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Sequence[FromCore]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        """As `listen`, in this loop. Whether the core hangs is found out by whoever started it."""
        self._listener = LoopListener(self, loop, on_message, on_death)

    def _read(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None:
        while not self.stopping.is_set():
            if (message := self.take()) is not None:
                on_message(message)
            elif self.lost():
                return on_death(self.death())
            else:
                self._reached()[0].wait(POLL_SECONDS)

    def send(self, message: ToCore) -> None:
        """Queue a message; never blocks. A dead core swallows it."""
        self._reached()[1].put(message)

    def alive(self) -> bool:
        """False once it has ended."""
        return self._error is None

    def stopped(self) -> bool:
        """Whether the system has it, or a worker of its, stopped."""
        return self._tree is not None and self._tree.stopped()

    # -- `engine.frontend.loop_listener.Heard` -------------------------------------------------------------------------
    def fileno(self) -> int:
        """For event loops."""
        return self._reached()[0].fileno()

    def take(self) -> FromCore | None:
        """The next message, if one is there."""
        try:
            return self._reached()[0].take()
        except msgspec.DecodeError as error:  # for this process it is dead
            remedy = "use the same version of Engine in all processes, and report this"
            self._error = EngineDeadError("read what the engine core sent", str(error), remedy)
            self.failed = True
            return None

    def lost(self) -> bool:
        """Whether whoever started it said that it has ended."""
        return self._error is not None

    def death(self) -> EngineError:
        """What it ended with."""
        assert self._error is not None
        return self._error

    def _reached(self) -> tuple[Inbox[FromCore], Outbox]:
        assert self._inbox is not None and self._outbox is not None
        return self._inbox, self._outbox

    def ask_to_stop(self) -> None:
        """Give the connection up; the core goes on. Does not wait. Idempotent."""
        self.stopping.set()
        self._placed.set()

    def shutdown(self) -> None:
        """The same, and free the sockets. Idempotent."""
        self._closed = True
        self.ask_to_stop()
        if self._listener is not None:
            self._listener.stop()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        with self._closing:
            if self._inbox is not None and self._outbox is not None:
                self._inbox.close()
                self._outbox.drop()
                self._inbox = self._outbox = None


class _Successors:
    """Cores that come in a dead one's place, as they are told of. See `engine.frontend.core_ranks.Successors`."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[AttachedCore | None] = queue.SimpleQueue()

    def start(self) -> AttachedCore | None:
        while (core := self.told.get()) is not None:
            try:
                core.wait_ready()
                return core
            except EngineError:  # it has died again
                core.shutdown()
        return None

    def stop(self) -> None:
        self.told.put(None)

    def shutdown(self) -> None:
        pass


class Attached:
    """All cores of one engine. See `engine.frontend.core_ranks.Links`.

    Args:
        client: this process's number, see `engine.types.messages.Attach`.
        start: what they were started with.
        size: how many they are.
        first: this process tells hooks of the engine's statistics, which every process of several could tell.
    """

    def __init__(self, client: int, start: CoreStart, size: int, first: bool = True) -> None:
        self.client, self.first = client, first
        self._start = start
        self._cores = [AttachedCore() for _ in range(size)]
        self._successors = [_Successors() for _ in range(size)]

    def plan(self, found: Launch) -> Launch:
        """What the launcher decides here, with the start message that the cores got.

        Raises ManifestError where other drivers are chosen here than there.
        """
        if found.start.worker.choices != self._start.worker.choices:
            raise ManifestError(
                "start an API process",
                "it finds other plugins installed than the process that started the engine",
                "start the server again",
            )
        return replace(found, start=self._start)

    def core(self, rank: int) -> AttachedCore:
        """The first of this rank."""
        return self._cores[rank]

    def successors(self, rank: int) -> _Successors:
        """Those that come in its place."""
        return self._successors[rank]

    def ready(self, place: CorePlace) -> None:
        """A core stands, the first of its rank or one in the place of a dead one."""
        core = self._cores[place.rank]
        if core.pid or core.lost():
            core = self._cores[place.rank] = AttachedCore()
            core.attach(place)
            self._successors[place.rank].told.put(core)
        else:
            core.attach(place)

    def died(self, rank: int, error: EngineError) -> None:
        """The core that stands there has ended."""
        self._cores[rank].died(error)
