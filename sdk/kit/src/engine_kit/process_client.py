"""The client of one engine core in another process: a child of this one, or one that another process has started."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from engine.interfaces.client import CoreState
from engine.process.child import Child, Elsewhere, ProcessTree
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Abort, Add, Call, FromCore, Ready, Reply, ToCore
from engine.types.outputs import CoreOutputs, StepStats
from engine.types.request import EngineRequest
from engine.types.start import CoreStart, WorkerReady

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
MODULE = "engine.loop.process"
POLL_SECONDS = 0.1
LEAVE_SECONDS = 5.0
"""How long a core gets to leave by itself."""
SILENT_SECONDS = 2.0
"""A core that has said nothing for so long may be stopped: one that goes round says so every second."""
LOOK_SECONDS = 0.1
"""How often it is looked whether a core that said nothing lives."""
BEHIND_SECONDS = 0.2
"""How long messages may wait before the loop counts as behind, and takes the news of several steps as those of one."""
HASTY_MESSAGES = 16
"""How many, then."""
DETACH_SECONDS = 5.0


class Heard(Protocol[T_co]):
    """Whom a `LoopListener` hears: see `engine.process.child.Child`."""

    stopping: threading.Event
    failed: bool

    def fileno(self) -> int: ...
    def take(self) -> T_co | None: ...
    def lost(self) -> bool: ...
    def death(self) -> EngineError: ...


class CoreEnd(Heard[FromCore], Protocol):
    """This process's end of a core. One that is `remote` has a process of another machine."""

    remote: bool

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def silence(self) -> float: ...
    def send(self, message: ToCore) -> None: ...
    def receive(self, timeout: float) -> FromCore | None: ...
    def ask_to_stop(self) -> None: ...
    def end(self, grace: float) -> int: ...
    def close(self) -> None: ...


def start_process(
    start: CoreStart, elsewhere: Elsewhere | None = None, at_end: Callable[[], None] | None = None
) -> ProcessClient:
    """Start an engine core in a process of its own, where it begins to load the model. at_end: see `ClientContext`.

    Raises EngineDeadError where the process cannot be started.
    """
    silence = start.step_timeout
    child: Child[FromCore] = Child(
        MODULE, start, FromCore, what="the engine core", silence=silence, elsewhere=elsewhere
    )
    return ProcessClient(child, start.worker.data_parallel_rank, at_end=at_end)


class ProcessClient:
    """See `engine.interfaces.client.OneCore`.

    Args:
        core: this process's end of it.
        dp_rank: of the core.
        client: this process's number for the core: 0, who started it, or see `engine.types.messages.Attach`.
        at_end: called when it has ended.
    """

    def __init__(
        self, core: CoreEnd, dp_rank: int = 0, client: int = 0, at_end: Callable[[], None] | None = None
    ) -> None:
        self._core = core
        self._at_end = at_end
        self._dp_rank = dp_rank
        self._client = client
        self._unfinished: dict[str, None] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._worker: WorkerReady | None = None
        self._tree: ProcessTree | None = None
        self._stats: StepStats | None = None
        self._num_others = 0
        self._error: EngineError | None = None
        self._listener: LoopListener[FromCore] | None = None
        self._starting = threading.Lock()  # held while `wait_ready` reads what `shutdown` closes
        self._closing = threading.Event()

    @property
    def worker(self) -> WorkerReady:
        assert self._worker is not None
        return self._worker

    def wait_ready(self) -> WorkerReady:
        with self._starting:
            answer = self._wait_ready()
        if isinstance(answer, WorkerReady):
            return answer
        self.shutdown()
        raise answer

    def _wait_ready(self) -> WorkerReady | EngineError:
        while not self._core.stopping.is_set():
            try:
                message = self._core.receive(POLL_SECONDS)
            except EngineError as error:
                if not self._core.stopping.is_set():
                    return error
                break
            if isinstance(message, Ready):
                self._tree = None if self._core.remote else ProcessTree(self._core.pid)
                self._worker = message.worker
                return message.worker
        return EngineDeadError("start the engine core's process", "it was shut down while it started")

    # -- what is sent --------------------------------------------------------------------------------------------------
    def add(self, requests: Sequence[EngineRequest]) -> None:
        if self._error is not None:
            raise self._error
        self._core.send(Add(list(requests), self._client))
        self._unfinished.update(dict.fromkeys(request.request_id for request in requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [name for name in dict.fromkeys(request_ids) if name in self._unfinished]
        for name in known:
            del self._unfinished[name]
        if known:
            self._core.send(Abort(known, self._client))

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._error is not None:
            answer.set_exception(self._error)
        else:
            number = next(self._call_ids)
            self._calls[number] = answer
            self._core.send(Call(number, method, self._client, list(args)))
        return answer

    def tell(self, message: ToCore, dp_rank: int | None = None) -> None:
        if dp_rank in (None, self._dp_rank):
            self._core.send(message)

    def cache_reset(self) -> None:
        """There is no router whose memory would have to follow."""

    # -- what is heard -------------------------------------------------------------------------------------------------
    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        on_news: Callable[[Sequence[CoreOutputs]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        def hear(messages: Sequence[FromCore]) -> None:
            if several := [news for message in messages if (news := self._take(message)) is not None]:
                on_news(several)

        def die(error: EngineError) -> None:
            self._die(error)
            on_death(error)

        self._listener = LoopListener(self._core, loop, hear, die)

    def fileno(self) -> int:
        return self._core.fileno()

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._error is not None:
                raise self._error
            left = POLL_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._core.receive(left)
            except EngineError as error:
                self._die(error)
                raise
            if message is None:
                if deadline is not None:
                    return CoreOutputs(outputs=[])
            elif (news := self._take(message)) is not None and news.outputs:
                return news

    def _take(self, message: FromCore) -> CoreOutputs | None:
        if isinstance(message, CoreOutputs):
            if message.stats is not None:
                self._stats = message.stats
                self._num_others = message.others
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._unfinished.pop(output.request_id, None)
            return message
        if isinstance(message, Reply):
            answer = self._calls.pop(message.call_id, None)
            if answer is None or answer.done():  # whoever asked has given up
                pass
            elif message.error:
                answer.set_exception(EngineError("call the engine core", message.error))
            else:
                answer.set_result(message.value)
        return None

    def _die(self, error: EngineError) -> None:
        self._error = error
        self._num_others = 0
        answers, self._calls = self._calls, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def unfinished(self) -> Collection[str]:
        return self._unfinished.keys()

    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def num_others(self) -> int:
        return self._num_others

    @property
    def last_stats(self) -> StepStats | None:
        return self._stats

    def states(self, look: bool = True) -> list[CoreState]:
        if self._worker is None:
            return []
        stats, unfinished, alive = self._stats, len(self._unfinished) + self._num_others, self._error is None
        running, usage = 0, 0.0
        if stats is not None:
            running = min(stats.num_running, unfinished)
            usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        stopped = look and alive and self._stopped()
        waiting = unfinished - running
        return [CoreState(self._dp_rank, self._core.pid, alive, running, waiting, usage, stats, stopped, self._error)]

    def responds(self) -> bool:
        return self._error is None and not (self._core.silence >= SILENT_SECONDS and self._stopped())

    def _stopped(self) -> bool:
        return self._tree is not None and self._tree.stopped()

    def alive(self) -> bool:
        return self._core.alive

    # -- the end -------------------------------------------------------------------------------------------------------
    def ask_to_stop(self) -> None:
        self._core.ask_to_stop()

    def shutdown(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._core.end(LEAVE_SECONDS)
        if self._listener is not None:
            self._listener.stop()
        with self._starting:
            self._core.close()
        if self._at_end is not None:
            self._at_end()


class LoopListener(Generic[T]):
    """Hands over what comes, in the loop, until the core has ended or `stop` is called.

    A message is handed over in a turn of the loop of its own, so that whoever reads a stream has read the news of one
    step before those of the next come. That holds until the loop is behind: then the news of several steps are handed
    over as those of one, which costs less, and the loop catches up.

    Args:
        core: whose messages, or another process; nobody else reads its socket now.
        loop: this thread's.
        on_message: takes one, or several that came.
        on_death: takes the error, once, if it is lost.

    Raises NotImplementedError: loops of this kind cannot wait for a socket of ZeroMQ.
    """

    def __init__(
        self,
        core: Heard[T],
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Sequence[T]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        self._core = core
        self._loop = loop
        self._thread = threading.current_thread()
        self._on_message = on_message
        self._on_death = on_death
        self._file = core.fileno()
        loop.add_reader(self._file, self._readable)
        self._listening = True
        self._scheduled = False
        self._empty = loop.time()
        self._farewell: threading.Thread | None = None  # finds out what became of the core
        self._look_handle = loop.call_later(LOOK_SECONDS, self._look)
        self._readable()  # what came before is not told again

    def stop(self) -> None:
        """Hear nothing any more. From any thread; returns when the socket is not used any more. Idempotent."""
        if not self._listening or self._loop.is_closed():
            self._listening = False
        elif not self._loop.is_running() or threading.current_thread() is self._thread:
            self._detach()
        else:
            detached = threading.Event()

            def detach() -> None:
                self._detach()
                detached.set()

            with contextlib.suppress(RuntimeError):  # it has closed meanwhile
                self._loop.call_soon_threadsafe(detach)
                detached.wait(DETACH_SECONDS)
        if self._farewell is not None and self._farewell is not threading.current_thread():
            self._farewell.join()

    def _detach(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._file)
            self._look_handle.cancel()

    # ZeroMQ's descriptor tells of a change once: it is to be read until there is nothing, or looked at again.
    def _readable(self) -> None:
        if not self._scheduled:
            self._empty = self._loop.time()
            self._take()

    def _take(self) -> None:
        self._scheduled = False
        behind = self._loop.time() - self._empty > BEHIND_SECONDS
        messages: list[T] = []
        for _ in range(HASTY_MESSAGES if behind else 1):
            if not self._listening or self._core.stopping.is_set():
                return self._detach()
            message = self._core.take()
            if message is None:
                self._empty = 0.0
                break
            messages.append(message)
        failed = self._core.failed
        try:
            if messages:
                self._on_message(messages)
        finally:  # whatever became of these, others may have come, of which the descriptor would not tell
            if failed:
                self._end()
            elif self._empty:
                self._scheduled = True
                self._loop.call_soon(self._take)

    def _look(self) -> None:
        if self._core.stopping.is_set():
            return self._detach()
        if self._core.lost():
            return self._end()
        self._look_handle = self._loop.call_later(LOOK_SECONDS, self._look)

    def _end(self) -> None:
        """Tell what became of the core: that takes time, in which the loop goes on."""

        def find_out() -> None:
            error = self._core.death()
            with contextlib.suppress(RuntimeError):  # the program has ended; there is nobody to tell
                self._loop.call_soon_threadsafe(self._on_death, error)

        self._farewell = threading.Thread(target=find_out, name="core-end", daemon=True)
        self._farewell.start()
        self._detach()  # now: from here on `stop`, in another thread, waits for that one alone
