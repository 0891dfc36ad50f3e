"""Several engine cores as one: each a process of its own with its own workers, and requests spread over them.

A core's death loses only its own sequences: they end with RankDeadError, and the others go on. When the last one dies,
its error is the engine's. Cores that share experts compute each step together: none goes on without the others, so the
first death is the engine's.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import math
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import connection
from typing import Any

from msgspec.structs import replace

from engine.interfaces.client import ClientContext, CoreState, OneCore
from engine.interfaces.router import RankLoad, Router
from engine.plugin.manifest import Blame
from engine.types.errors import ContractError, EngineDeadError, EngineError, RankDeadError
from engine.types.messages import ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import CoreStart, WorkerReady
from engine_parallel.merged import counters, merge_cores, merge_stats
from engine_parallel.question import Question
from engine_parallel.restarts import Restarts

log = logging.getLogger("engine.parallel")

WAIT_SECONDS = 0.1
"""How long `receive` waits before it looks again whether the cores live, and whether one has come back."""


class ParallelClient:
    """See `engine.interfaces.client.RemoteClient`. What waits at a core is counted here, not there: everything that was
    sent and has not ended, less what the core says is running. So a burst is spread evenly although no core has told of
    it yet."""

    def __init__(self, context: ClientContext) -> None:
        self._owner = context.owner
        self._at_end = context.at_end
        self._make_router = context.router
        self._router: Router | None = None
        self._blame = Blame(context.core.worker.choices)
        self._worker: WorkerReady | None = None
        self._meeting = ""
        self._together = context.core.worker.parallel.dp > 1
        if context.owner and self._together:
            self._meeting = tempfile.mkdtemp(prefix="engine-")
        starts = dp_starts(context.core, context.num_cores, self._meeting)
        self._restarts = [Restarts(partial(context.connect, start), context.restarts) for start in starts]
        self._past: list[StepStats | None] = [None] * len(starts)  # counters of those that stood in its place and died
        self._errors: list[EngineError | None] = [None] * len(starts)
        self._living = list(range(len(starts)))
        self._first = 0
        self._revived: queue.SimpleQueue[tuple[int, OneCore]] = queue.SimpleQueue()
        self._questions: list[Question] = []
        self._closing: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_news: Callable[[Sequence[CoreOutputs]], None]
        self._on_death: Callable[[EngineError], None]
        self._cores: list[OneCore] = []
        try:
            for start in starts:
                self._cores.append(context.connect(start))
        except BaseException:
            self.shutdown()
            raise

    @property
    def worker(self) -> WorkerReady:
        assert self._worker is not None
        return self._worker

    def wait_ready(self) -> WorkerReady:
        """Raises the first error of any core, or the router's; all are shut down then."""
        with ThreadPoolExecutor(len(self._cores), "ready") as pool:
            waiting = [pool.submit(core.wait_ready) for core in self._cores]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            failed = [error for future in done if (error := future.exception()) is not None]
            if failed:
                self.shutdown()  # which also ends the waits that go on
                raise failed[0]
        ready = [future.result() for future in waiting]
        try:
            self._router = self._make_router(ready)
        except BaseException:
            self.shutdown()
            raise
        self._worker = merge_cores(ready)
        return self._worker

    # -- what is sent --------------------------------------------------------------------------------------------------
    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Raises ContractError where the router fails."""
        if not self._living:
            raise EngineDeadError("send a request", "no engine core lives", "start the engine again")
        with self._blame:
            dp_rank = self._living[0] if len(self._living) == 1 else self._route(requests)
        self._cores[dp_rank].add(requests)

    def _route(self, requests: Sequence[EngineRequest]) -> int:
        assert self._router is not None
        # What the system has stopped would keep its requests waiting; where all are stopped, all wait.
        offered = [dp_rank for dp_rank in self._living if self._cores[dp_rank].responds()] or self._living
        if len(offered) == 1:
            return offered[0]
        loads = [RankLoad(dp_rank, *self._load(dp_rank)) for dp_rank in offered]
        try:
            dp_rank = self._router.route(requests, loads)
        except Exception as error:
            found = f"the router raised {type(error).__name__}: {error}"
            raise ContractError("choose an engine core", found, point="router") from error
        if type(dp_rank) is not int or dp_rank not in offered:
            found = f"the router named {dp_rank!r}, offered were {', '.join(map(str, offered))}"
            raise ContractError("choose an engine core", found, point="router")
        return dp_rank

    def _load(self, dp_rank: int) -> tuple[int, int, float]:
        (state,) = self._cores[dp_rank].states(look=False)
        return state.num_running, state.num_waiting, state.kv_usage

    def abort(self, request_ids: Sequence[str]) -> None:
        for dp_rank in self._living:
            core = self._cores[dp_rank]
            if mine := [name for name in request_ids if name in core.unfinished]:
                core.abort(mine)

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method == "reset_prefix_cache":
            self.cache_reset()
        question = Question(method, self._living)
        self._questions = [one for one in self._questions if not one.answer.done()] + [question]
        for dp_rank in self._living:
            core = self._cores[dp_rank]
            core.call(method, *args).add_done_callback(partial(self._answered, question, dp_rank, core))
        return question.answer

    def _answered(self, question: Question, dp_rank: int, core: OneCore, answer: Future[Any]) -> None:
        (state,) = core.states(look=False)
        if state.error is None or answer.exception() is not state.error:  # else it has died, and `_bury` follows
            question.take(dp_rank, answer)

    def tell(self, message: ToCore, dp_rank: int | None = None) -> None:
        for one in self._living:
            if dp_rank in (None, one):
                self._cores[one].tell(message)

    def cache_reset(self) -> None:
        if self._router is not None:
            self._router.cache_reset()

    # -- what is heard -------------------------------------------------------------------------------------------------
    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        on_news: Callable[[Sequence[CoreOutputs]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        self._loop = loop
        self._on_news = on_news
        self._on_death = on_death
        for dp_rank in self._living:
            self._hear(dp_rank, loop)

    def _hear(self, dp_rank: int, loop: asyncio.AbstractEventLoop) -> None:
        core = self._cores[dp_rank]

        def news(several: Sequence[CoreOutputs]) -> None:
            told: list[CoreOutputs] = []
            for one in several:
                if self._lives(dp_rank, core):  # what the dead say is not heard
                    told.append(self._heard(dp_rank, one))
            if told:
                self._on_news(told)

        def died(error: EngineError) -> None:
            if self._lives(dp_rank, core):
                lost = self._bury(dp_rank, error)
                if self._living:
                    self._on_news([lost])
                else:
                    self._on_death(error)

        core.listen(loop, news, died)

    def _lives(self, dp_rank: int, core: OneCore) -> bool:
        return self._cores[dp_rank] is core and dp_rank in self._living

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._revive()
            if not self._living:
                raise EngineDeadError("wait for news", "no engine core lives", "start the engine again")
            self._first += 1  # each core is first in its turn
            for i in range(len(self._living)):
                dp_rank = self._living[(self._first + i) % len(self._living)]
                try:
                    news = self._heard(dp_rank, self._cores[dp_rank].receive(0.0))
                except EngineError as error:
                    news = self._bury(dp_rank, error)
                    if not self._living:
                        raise
                if news.outputs:
                    return news
                if dp_rank not in self._living:
                    break
            if (left := deadline - time.monotonic()) <= 0:
                return CoreOutputs(outputs=[])
            connection.wait([self._cores[dp_rank].fileno() for dp_rank in self._living], min(left, WAIT_SECONDS))

    def _heard(self, dp_rank: int, news: CoreOutputs) -> CoreOutputs:
        """What a living core told; where it told that it dies, what that means for its sequences."""
        if len(self._living) == 1 or self._together:
            return news
        last = next((output for output in news.outputs if output.error is not None and _is_dead(output)), None)
        if last is None:
            return news
        # Its executor has failed: the process tells so and ends. What it says of its requests, we know better.
        error = EngineDeadError(*(last.error or ("", "", "", ""))[1:])
        return self._bury(dp_rank, error, news.outputs)

    def _bury(self, dp_rank: int, error: EngineError, last: Sequence[CoreOutput] = ()) -> CoreOutputs:
        """A core has died. Returns its sequences' end, after what it told of others `last`."""
        core = self._cores[dp_rank]
        lost = [output.request_id for output in last if _is_dead(output)] + list(core.unfinished)
        for one in list(self._living) if self._together else [dp_rank]:
            self._past[one] = counters(self._stats(one))
            self._living.remove(one)
            self._errors[one] = error
            for question in self._questions:
                question.leave(one, error if not self._living else None)
            if one != dp_rank:
                self._cores[one].ask_to_stop()
        assert self._router is not None
        self._router.rank_died(dp_rank)
        if not self._living:
            return CoreOutputs(outputs=[])
        log.log(
            logging.ERROR if self._owner else logging.INFO,
            "data-parallel rank %d of %d has died, and %d sequences with it; %d go on: %s",
            *(dp_rank, len(self._cores), len(lost) + core.num_others, len(self._living), error),
        )
        self._replace(dp_rank)
        how = "; ".join(part for part in (error.asked, error.found) if part)  # its remedy is for all being dead
        parts = RankDeadError(
            f"a request on data-parallel rank {dp_rank}", how, "send it again: the other ranks go on"
        ).parts
        ended = [CoreOutput(request_id=name, finish_reason=FinishReason.ERROR, error=parts) for name in lost]
        return CoreOutputs(outputs=[*(output for output in last if not _is_dead(output)), *ended])

    def _replace(self, dp_rank: int) -> None:
        """Free what a dead core's process has left, and start another: off this thread, for either takes seconds."""
        core, restarts, loop = self._cores[dp_rank], self._restarts[dp_rank], self._loop

        def replace() -> None:
            core.shutdown()
            if (another := restarts.start()) is not None:
                self._revived.put((dp_rank, another))
                if loop is not None:
                    with contextlib.suppress(RuntimeError):  # it has closed; there is nobody to tell
                        loop.call_soon_threadsafe(self._revive)

        closing = threading.Thread(target=replace, name=f"close-{dp_rank}", daemon=True)
        self._closing.append(closing)
        closing.start()

    def _revive(self) -> None:
        """Put new cores in the places of those that died."""
        while not self._revived.empty():
            dp_rank, core = self._revived.get()
            self._cores[dp_rank] = core
            if not self._living:  # too late: the engine has died
                return core.ask_to_stop()
            bisect.insort(self._living, dp_rank)
            self._errors[dp_rank] = None
            log.log(
                logging.WARNING if self._owner else logging.INFO,
                "data-parallel rank %d of %d stands again",
                *(dp_rank, len(self._cores)),
            )
            if self._loop is not None:
                self._hear(dp_rank, self._loop)
                self._on_news([])

    # -- state ---------------------------------------------------------------------------------------------------------
    def has_work(self) -> bool:
        return any(self._cores[dp_rank].has_work() for dp_rank in self._living)

    @property
    def num_others(self) -> int:
        return sum(self._cores[dp_rank].num_others for dp_rank in self._living)

    @property
    def last_stats(self) -> StepStats | None:
        several = [self._stats(dp_rank) for dp_rank in range(len(self._cores))]
        return merge_stats([stats for stats in several if stats is not None])

    def _stats(self, dp_rank: int) -> StepStats | None:
        """Of this rank, those that died counted in."""
        told = self._cores[dp_rank].last_stats if dp_rank in self._living else None
        return merge_stats([stats for stats in (self._past[dp_rank], told) if stats is not None])

    def states(self, look: bool = True) -> list[CoreState]:
        if self._worker is None:
            return []
        found: list[CoreState] = []
        for dp_rank, core in enumerate(self._cores):
            lives, stats = dp_rank in self._living, self._stats(dp_rank)
            (state,) = core.states(look and lives)
            if lives:
                found.append(state._replace(stats=stats))
            else:
                found.append(CoreState(dp_rank, state.pid, False, 0, 0, 0.0, stats, error=self._errors[dp_rank]))
        return found

    def responds(self) -> bool:
        return any(self._cores[dp_rank].responds() for dp_rank in self._living)

    def alive(self) -> bool:
        return any(core.alive() for core in self._cores)

    # -- the end -------------------------------------------------------------------------------------------------------
    def ask_to_stop(self) -> None:
        for restarts in self._restarts:
            restarts.stop()
        for core in self._cores:
            core.ask_to_stop()

    def shutdown(self) -> None:
        self.ask_to_stop()
        for core in self._cores:
            core.shutdown()
        for closing in self._closing:
            closing.join()
        for restarts in self._restarts:
            restarts.shutdown()
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)
        if self._at_end is not None:
            self._at_end()


def dp_starts(start: CoreStart, size: int, meeting: str = "") -> list[CoreStart]:
    """The start messages of `size` engine cores on this machine: they share its processor's cores evenly.

    meeting: see `WorkerStart.meeting`.

    What the user set (KV cache, batch size) is each core's own; what the platform measures is divided by the platform,
    which knows whether ranks share it.
    """
    worker = start.worker
    threads = max(1, processors() // size)
    if worker.num_threads is not None:
        threads = min(threads, worker.num_threads)
    worker = replace(worker, data_parallel_size=size, num_threads=threads, meeting=meeting)
    return [replace(start, worker=replace(worker, data_parallel_rank=dp_rank)) for dp_rank in range(size)]


def processors() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _is_dead(output: CoreOutput) -> bool:
    """Whether the sequence ended because its engine core has died."""
    return output.error is not None and output.error[0] == EngineDeadError.code
