"""Engine cores without processes: a test says what they say."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec

from engine.interfaces.client import ClientContext, CoreState
from engine.interfaces.router import RankLoad
from engine.types.errors import EngineDeadError, EngineError
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import Choice, WorkerReady
from engine_parallel.client import ParallelClient

GONE = EngineDeadError("the core", "gone", "start it again")


class Played:
    """See `engine.interfaces.client.OneCore`."""

    def __init__(self, dp_rank: int, error: EngineError | None = None, slow: bool = False) -> None:
        self.dp_rank = dp_rank
        self.start_error = error
        self.slow = slow
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.unfinished: dict[str, None] = {}
        self.calls: list[tuple[str, Future[Any]]] = []
        self.heard: deque[CoreOutputs | EngineError] = deque()
        self.left = threading.Event()
        self.last_stats: StepStats | None = None
        self.error: EngineError | None = None
        self.num_others = 0
        self.answers = True
        self.on_news: Callable[[Sequence[CoreOutputs]], None] | None = None
        self._read, self._write = socket.socketpair()

    @property
    def worker(self) -> WorkerReady:
        return WorkerReady(
            num_pages=10 + self.dp_rank, weight_bytes=5, cache_bytes=0, num_parameters=7, load_seconds=self.dp_rank
        )

    def wait_ready(self) -> WorkerReady:
        if self.start_error is not None:
            raise self.start_error
        if self.slow:
            assert self.left.wait(10), "nobody ended the wait"
            raise EngineDeadError("start", "it was shut down while it started")
        return self.worker

    def add(self, requests: Sequence[EngineRequest]) -> None:
        assert not self.left.is_set(), "its sockets are gone"
        self.added += (names := [request.request_id for request in requests])
        self.unfinished.update(dict.fromkeys(names))

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name in self.unfinished:
                del self.unfinished[name]
                self.aborted.append(name)

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.calls.append((method, answer))
        return answer

    def answer(self, value: Any = None, error: str = "") -> None:
        """To the last call."""
        _, answer = self.calls[-1]
        if error:
            answer.set_exception(EngineError("call the engine core", error))
        else:
            answer.set_result(msgspec.to_builtins(value))

    def say(self, *outputs: CoreOutput, stats: StepStats | None = None) -> None:
        """News of one step."""
        self._tell(CoreOutputs(outputs=list(outputs), stats=stats))

    def die(self, error: EngineError = GONE) -> None:
        self._tell(error)

    def _tell(self, news: CoreOutputs | EngineError) -> None:
        if self.on_news is None:
            self.heard.append(news)
            with contextlib.suppress(OSError):  # it was shut down
                self._write.send(b"x")
        else:
            self._take(news)

    def _take(self, news: CoreOutputs | EngineError) -> None:
        """As `ProcessClient` does."""
        if isinstance(news, EngineError):
            self.error = news
            for _, answer in self.calls:
                if not answer.done():
                    answer.set_exception(news)
            if self.on_news is not None:
                self.on_death(news)
            return
        self.last_stats = news.stats or self.last_stats
        for output in news.outputs:
            if output.finish_reason is not None:
                self.unfinished.pop(output.request_id, None)
        if self.on_news is not None:
            self.on_news([news])

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        assert timeout == 0
        if self.error is not None:
            raise self.error
        while self.heard:
            self._read.recv(1)
            self._take(news := self.heard.popleft())
            if isinstance(news, EngineError):
                raise news
            if news.outputs:
                return news
        return CoreOutputs(outputs=[])

    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        on_news: Callable[[Sequence[CoreOutputs]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        self.on_news = on_news
        self.on_death = on_death

    def fileno(self) -> int:
        return self._read.fileno()

    def has_work(self) -> bool:
        return bool(self.unfinished)

    def states(self, look: bool = True) -> list[CoreState]:
        stats, count = self.last_stats, len(self.unfinished) + self.num_others
        running = 0 if stats is None else min(stats.num_running, count)
        usage = stats.pages_used / stats.pages_total if stats and stats.pages_total else 0.0
        stopped, alive = look and not self.answers, self.error is None
        pid = 1000 + self.dp_rank
        return [CoreState(self.dp_rank, pid, alive, running, count - running, usage, stats, stopped, self.error)]

    def responds(self) -> bool:
        return self.answers

    def alive(self) -> bool:
        return not self.left.is_set()

    def ask_to_stop(self) -> None:
        self.left.set()

    def shutdown(self) -> None:
        self.left.set()
        self._read.close()
        self._write.close()


class Scripted:
    """A router that takes turns, or says what it is told to, and keeps what it saw."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.seen: list[list[RankLoad]] = []
        self.died: list[int] = []
        self.turn = -1
        self.resets = 0

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        self.seen.append(list(ranks))
        self.turn += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if callable(self.answer):
            return self.answer(ranks)  # type: ignore[no-any-return]
        return ranks[self.turn % len(ranks)].rank if self.answer is None else self.answer  # type: ignore[return-value]

    def rank_died(self, rank: int) -> None:
        self.died.append(rank)

    def cache_reset(self) -> None:
        self.resets += 1


class House:
    """A client of so many cores, which are played.

    Attributes:
        lives: the cores of each rank, those that came in dead ones' places too.
    """

    def __init__(
        self, count: int, restarts: int = 0, router: Any = None, first: Sequence[Played] = (), together: bool = False
    ) -> None:
        self.lives: list[list[Played]] = [[] for _ in range(count)]
        self.router = router or Scripted()
        self.slow_next = False
        first_lives = {core.dp_rank: core for core in first}

        def connect(start: Any) -> Played:
            lives = self.lives[start.worker.data_parallel_rank]
            core = first_lives.pop(start.worker.data_parallel_rank, None) or Played(start.worker.data_parallel_rank)
            core.slow = core.slow or self.slow_next
            lives.append(core)
            return core

        def build(workers: Sequence[WorkerReady]) -> Any:
            if isinstance(self.router, Exception):
                raise self.router
            return self.router

        choice = Choice(point="router", driver="turns", distribution="engine-turns", version="1.2", value="turns:Card")
        parallel = Parallel(dp=count if together else 1)
        core: Any = SimpleNamespace(worker=SimpleNamespace(choices=(choice,), parallel=parallel))
        context = ClientContext(core=core, num_cores=count, restarts=restarts, connect=connect, router=build)
        self.client = ParallelClient(context)

    @property
    def cores(self) -> list[Played]:
        """Those that stand now."""
        return [lives[-1] for lives in self.lives]

    @property
    def living(self) -> list[int]:
        return [state.dp_rank for state in self.client.states() if state.alive]


def played_starts(start: Any, size: int, meeting: str) -> list[Any]:
    """In place of `dp_starts`."""
    return [SimpleNamespace(worker=SimpleNamespace(data_parallel_rank=dp_rank)) for dp_rank in range(size)]


def house(
    count: int, restarts: int = 0, router: Any = None, first: Sequence[Played] = (), together: bool = False
) -> House:
    """One whose cores are ready. together: they step in lockstep."""
    made = House(count, restarts, router, first, together)
    made.client.wait_ready()
    return made


def requests(*names: str) -> list[EngineRequest]:
    return [EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams()) for name in names]


def token(name: str, finish: FinishReason | None = None, error: EngineError | None = None) -> CoreOutput:
    parts = None if error is None else error.parts
    return CoreOutput(request_id=name, new_token_ids=[] if error else [5], finish_reason=finish, error=parts)


def ended(*names: str) -> list[CoreOutput]:
    return [token(name, FinishReason.STOP) for name in names]


def stats(**fields: Any) -> StepStats:
    blank = dict.fromkeys(StepStats.__struct_fields__, 0) | {
        "hook_failures": (),
        "accepted_drafts_at": (),
        "kv_connectors": (),
        "retained_pages": (),
        "retention_events": (),
    }
    return StepStats(**(blank | fields))
