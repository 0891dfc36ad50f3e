"""The client of one engine core in another process: started here, or attached to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from engine.frontend.core_process import CoreProcess
from engine.frontend.loop_listener import LOOK_SECONDS, Heard, LoopListener
from engine.interfaces.client import CoreState
from engine.types.errors import EngineError, rebuild_error
from engine.types.messages import Abort, Add, Call, Failed, FromCore, Outputs, Reply, ToCore
from engine.types.outputs import CoreOutputs, StepStats
from engine.types.request import EngineRequest
from engine.types.start import CoreStart, WorkerReady

SILENT_SECONDS = 2.0
"""A core that has said nothing for so long may be stopped: one that goes round says so every second."""


class Link(Heard, Protocol):
    """The connection to a core's process: see `CoreProcess`, which starts it, and `AttachedCore`, which does not."""

    client: int

    @property
    def pid(self) -> int: ...

    def wait_ready(self) -> WorkerReady: ...

    def send(self, message: ToCore) -> None: ...

    def alive(self) -> bool: ...

    def stopped(self) -> bool: ...

    def ask_to_stop(self) -> None: ...

    def shutdown(self) -> None: ...


def start_process(start: CoreStart) -> ProcessClient:
    """Start an engine core in a process of its own, where it begins to load the model."""
    return ProcessClient(CoreProcess(start), start.worker.data_parallel_rank, start.step_timeout)


class ProcessClient:
    """See `engine.interfaces.client.RemoteClient`.

    Args:
        link: to the process.
        dp_rank: of the core.
        step_timeout: seconds of silence after which the core counts as hung.
    """

    def __init__(self, link: Link, dp_rank: int = 0, step_timeout: float = float("inf")) -> None:
        self._link = link
        self._dp_rank = dp_rank
        self._step_timeout = step_timeout
        self._unfinished: dict[str, None] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._worker: WorkerReady | None = None
        self._stats: StepStats | None = None
        self._num_others = 0
        self._error: EngineError | None = None
        self._silence = 0.0
        self._looked = 0.0
        self._listener: LoopListener | None = None

    @property
    def worker(self) -> WorkerReady:
        assert self._worker is not None
        return self._worker

    def wait_ready(self) -> WorkerReady:
        self._worker = self._link.wait_ready()
        return self._worker

    # -- what is sent --------------------------------------------------------------------------------------------------
    def add(self, requests: Sequence[EngineRequest]) -> None:
        if self._error is not None:
            raise self._error
        self._link.send(Add(list(requests), self._link.client))
        self._unfinished.update(dict.fromkeys(request.request_id for request in requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        known = [name for name in request_ids if name in self._unfinished]
        for name in known:
            self._unfinished.pop(name, None)
        if known:
            self._link.send(Abort(known, self._link.client))

    def call(self, method: str) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._error is not None:
            answer.set_exception(self._error)
        else:
            number = next(self._call_ids)
            self._calls[number] = answer
            self._link.send(Call(number, method, self._link.client))
        return answer

    def tell(self, message: ToCore, dp_rank: int | None = None) -> None:
        if dp_rank in (None, self._dp_rank):
            self._link.send(message)

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

        self._listener = LoopListener(self._link, loop, hear, die, self._step_timeout)

    def fileno(self) -> int:
        return self._link.outputs.fileno()

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        left = float("inf") if timeout is None else timeout
        while True:
            if self._error is not None:
                raise self._error
            wait = min(left, LOOK_SECONDS)
            if self._link.outputs.poll(round(1000 * wait)):
                self._silence = 0.0
                try:
                    message = self._link.decode(self._link.outputs.recv())
                except msgspec.DecodeError as error:
                    raise self._die(self._link.end_unreadable(error)) from error
                if isinstance(message, Failed):
                    raise self._die(rebuild_error(message.error))
                if (news := self._take(message)) is not None and news.outputs:
                    return news
                continue
            self._look()
            if (left := left - wait) <= 0:
                return CoreOutputs(outputs=[])

    def _look(self) -> None:
        """Nothing has come: find out whether the core lives."""
        # A pause counts for little: a machine that slept, or a caller who was busy, has not waited.
        now = time.monotonic()
        self._silence += min(now - self._looked, LOOK_SECONDS)
        self._looked = now
        if self._link.ended():
            raise self._die(self._link.why_ended())
        if self._silence >= self._step_timeout:
            raise self._die(self._link.end_hung())

    def _take(self, message: FromCore) -> CoreOutputs | None:
        if isinstance(message, Outputs):
            news = message.outputs
            if news.stats is not None:
                self._stats, self._num_others = news.stats, message.others
            for output in news.outputs:
                if output.finish_reason is not None:
                    self._unfinished.pop(output.request_id, None)
            return news
        if isinstance(message, Reply):
            answer = self._calls.pop(message.call_id, None)
            if answer is None or answer.done():  # whoever asked has given up
                pass
            elif message.error:
                answer.set_exception(EngineError("call the engine core", message.error))
            else:
                answer.set_result(message.value)
        return None

    def _die(self, error: EngineError) -> EngineError:
        self._error = error
        self._num_others = 0
        answers, self._calls = self._calls, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
        return error

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
        stopped = look and alive and self._link.stopped()
        waiting = unfinished - running
        return [CoreState(self._dp_rank, self._link.pid, alive, running, waiting, usage, stats, stopped, self._error)]

    def responds(self) -> bool:
        silence = self._silence if self._listener is None else self._listener.silence
        return self._error is None and not (silence >= SILENT_SECONDS and self._link.stopped())

    def alive(self) -> bool:
        return self._link.alive()

    # -- the end -------------------------------------------------------------------------------------------------------
    def ask_to_stop(self) -> None:
        self._link.ask_to_stop()

    def shutdown(self) -> None:
        self._link.ask_to_stop()
        if self._listener is not None:
            self._listener.stop()
        self._link.shutdown()
