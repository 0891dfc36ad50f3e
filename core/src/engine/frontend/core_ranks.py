"""Several engine cores as one: each a process of its own with its own workers, and requests spread over them.

One core is the case of one rank: there is no router, and its death is the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from engine.frontend.core_process import CoreProcess
from engine.frontend.rank_ledger import RankLedger
from engine.frontend.restarts import Restarts
from engine.interfaces.router import Router
from engine.plugin.manifest import Blame
from engine.types.errors import EngineDeadError, EngineError, RankDeadError
from engine.types.messages import Abort, Add, Attach, Call, Detach, FromCore, Outputs, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import CoreStart, WorkerReady

log = logging.getLogger("engine.frontend")


class Core(Protocol):
    """A connection to one engine core: see `CoreProcess`, which starts it, and `AttachedCore`, which does not."""

    @property
    def pid(self) -> int: ...

    def wait_ready(self) -> WorkerReady: ...

    def listen(self, on_message: Callable[[FromCore], None], on_death: Callable[[EngineError], None]) -> None: ...

    def listen_in(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Sequence[FromCore]], None],
        on_death: Callable[[EngineError], None],
    ) -> None: ...

    def send(self, message: ToCore) -> None: ...

    def alive(self) -> bool: ...

    def stopped(self) -> bool: ...

    def ask_to_stop(self) -> None: ...

    def shutdown(self) -> None: ...


class Successors(Protocol):
    """What comes in a dead core's place: see `Restarts`."""

    def start(self) -> Core | None: ...

    def stop(self) -> None: ...

    def shutdown(self) -> None: ...


class Links(Protocol):
    """How the cores are reached, where another process has started them."""

    client: int

    def core(self, rank: int) -> Core:
        """This rank's, which may not be ready."""
        ...

    def successors(self, rank: int) -> Successors:
        """What comes in its place."""
        ...


class Revived(NamedTuple):
    """A core that is ready to take the place of one that died."""

    core: Core


class RankNews(NamedTuple):
    """What a rank sent, or the error with which it ended, or what comes in its place."""

    rank: int
    news: FromCore | EngineError | Revived


class RankState(NamedTuple):
    """For monitors.

    Args:
        rank: its number.
        pid: of its process.
        alive: whether requests are sent to it.
        stopped: it lives, but the system has it or a worker of its stopped (SIGSTOP, a debugger): nothing is computed.
        num_running, num_waiting: sequences; what it has not told of yet counts as waiting.
        kv_usage: part of its KV cache in use; 0 to 1.
        stats: what it told last; of a dead one its counters.
    """

    rank: int
    pid: int
    alive: bool
    num_running: int
    num_waiting: int
    kv_usage: float
    stats: StepStats | None
    stopped: bool = False


class CoreRanks:
    """Starts the engine cores, routes requests to them, and notices their deaths.

    News come in on threads of the cores' own and are handed to `deliver`, which takes them to the one thread that may
    call `add`, `abort`, `take` and the like. A rank's death loses only its own sequences: `take` tells of them as ended
    with RankDeadError, and the others go on. When the last one dies, `take` answers the error that ended it.

    Args:
        starts: one a rank.
        router: makes the router when the ranks are ready; None where there is one.
        restarts: how often a dead rank is started again; not where it is the last one, whose death is the engine's.
        links: to cores that another process starts, again too; None: they are started here.
    """

    def __init__(
        self,
        starts: Sequence[CoreStart],
        router: Callable[[Sequence[WorkerReady]], Router | None] | None = None,
        restarts: int = 0,
        links: Links | None = None,
    ) -> None:
        self._make_router, self._blame = router, Blame(starts[0].worker.choices)
        self._client = 0 if links is None else links.client
        self._level = logging.ERROR if links is None else logging.INFO  # whoever starts cores says what becomes of them
        self._restarts: list[Successors] = [
            Restarts(start, restarts) if links is None else links.successors(rank) for rank, start in enumerate(starts)
        ]
        self._ledger, self._ready = RankLedger(1), False
        self._closing: list[threading.Thread] = []
        self._loop: tuple[asyncio.AbstractEventLoop, Callable[[Sequence[RankNews]], None]] | None = None
        self._cores: list[Core] = []
        try:
            for rank, start in enumerate(starts):
                self._cores.append(CoreProcess(start) if links is None else links.core(rank))
        except BaseException:
            self.shutdown()
            raise

    def wait_ready(self) -> list[WorkerReady]:
        """Wait until all are ready. `shutdown`, from another thread, ends the wait.

        Raises the first error of any; the others are shut down then. And what the router's body raises.
        """
        cores = self._cores
        if len(cores) == 1:
            ready = [cores[0].wait_ready()]
        else:
            with ThreadPoolExecutor(len(cores), "ready") as pool:
                waiting = [pool.submit(core.wait_ready) for core in cores]
                done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
                failed = [error for future in done if (error := future.exception()) is not None]
                if failed:
                    self.shutdown()  # which also ends the waits that go on
                    raise failed[0]
            ready = [future.result() for future in waiting]
        try:
            self._ledger = RankLedger(len(cores), None if self._make_router is None else self._make_router(ready))
        except BaseException:
            self.shutdown()
            raise
        self._ready = True
        return ready

    def listen(self, deliver: Callable[[RankNews], None]) -> None:
        """Begin to hand over news. `deliver` is called on several threads."""
        self._deliver = deliver
        for rank, core in enumerate(self._cores):
            self._hear(rank, core)

    def listen_in(self, loop: asyncio.AbstractEventLoop, take: Callable[[Sequence[RankNews]], None]) -> None:
        """As `listen`, but `take` is called in this loop, which runs this thread. It gets several where the loop is
        behind: news that may be taken in as one."""
        self._loop = loop, take
        self.listen(lambda news: _hand_over(loop, take, [news]))

    def _hear(self, rank: int, core: Core) -> None:
        if self._loop is not None:
            loop, take = self._loop
            with contextlib.suppress(NotImplementedError):  # a loop that waits for no sockets, as Windows' own
                return core.listen_in(
                    loop,
                    lambda several: take([RankNews(rank, news) for news in several]),
                    lambda error: take([RankNews(rank, error)]),
                )
        core.listen(_labelled(rank, self._deliver), _labelled(rank, self._deliver))

    # -- from here on: one thread ------------------------------------------------------------------------------------
    def add(self, requests: Sequence[EngineRequest]) -> int:
        """Send requests that belong together to one rank. Returns it. Raises ContractError, EngineDeadError."""
        with self._blame:
            rank = self._ledger.place(requests)
        self._cores[rank].send(Add(list(requests), self._client))
        return rank

    def abort(self, request_ids: Sequence[str]) -> None:
        """End sequences, each on the rank that has it; unknown ids are passed over."""
        for rank, ids in self._ledger.forget(request_ids).items():
            self._cores[rank].send(Abort(ids, self._client))

    def call(self, rank: int, call_id: int, method: str) -> None:
        """Ask one rank; its answer is a `Reply`."""
        if method == "reset_prefix_cache":
            self._ledger.cache_reset()
        self._cores[rank].send(Call(call_id, method, self._client))

    def take(self, item: RankNews) -> FromCore | EngineError | None:
        """Enter news in the book.

        Returns:
            The news, in which sequences that died with a rank are ended by RankDeadError; the error that ended the
            last rank; None where there is nothing to tell.
        """
        rank, news = item
        if isinstance(news, Revived):
            self._revive(rank, news.core)
            return None
        if not self._ledger.lives(rank):
            return None
        if isinstance(news, EngineError):
            return self._bury(rank, news, [])
        if isinstance(news, Outputs):
            if len(self._ledger.living) > 1 and (last := _last_words(news.outputs.outputs)):
                # Its executor has failed: the process tells so and ends. What it says of its requests, we know better.
                error = EngineDeadError(*(last.error or ("", "", "", ""))[1:])
                return self._bury(rank, error, [o for o in news.outputs.outputs if not _is_dead(o)])
            self._ledger.told(rank, news.outputs, news.others)
        return news

    def _bury(self, rank: int, error: EngineError, rest: list[CoreOutput]) -> Outputs | EngineError:
        self._ledger.told(rank, CoreOutputs(outputs=rest))
        others = self._ledger.others(rank)
        lost = self._ledger.bury(rank)
        living = len(self._ledger.living)
        if not living:
            return error
        log.log(
            self._level,
            "data-parallel rank %d of %d has died, and %d sequences with it; %d go on: %s",
            *(rank, self._ledger.num_ranks, len(lost) + others, living, error),
        )
        self._close(rank)
        how = "; ".join(part for part in (error.asked, error.found) if part)  # its remedy is for all being dead
        parts = RankDeadError(
            f"a request on data-parallel rank {rank}", how, "send it again: the other ranks go on"
        ).parts
        ended = [CoreOutput(request_id=name, finish_reason=FinishReason.ERROR, error=parts) for name in lost]
        return Outputs(CoreOutputs(outputs=[*rest, *ended]))

    def _close(self, rank: int) -> None:
        """Free what a dead rank's process has left, and start another: off this thread, for either takes seconds."""
        core, restarts, deliver = self._cores[rank], self._restarts[rank], self._deliver

        def replace() -> None:
            core.shutdown()
            if (another := restarts.start()) is not None:
                deliver(RankNews(rank, Revived(another)))

        closing = threading.Thread(target=replace, name=f"close-{rank}", daemon=True)
        self._closing.append(closing)
        closing.start()

    def _revive(self, rank: int, core: Core) -> None:
        """Put a new core in a dead one's place."""
        self._cores[rank] = core
        if not self._ledger.living:  # too late: the engine has died
            return core.ask_to_stop()
        self._ledger.revive(rank)
        self._hear(rank, core)
        level = min(self._level, logging.WARNING)
        log.log(level, "data-parallel rank %d of %d stands again", rank, self._ledger.num_ranks)

    # -- state -------------------------------------------------------------------------------------------------------
    @property
    def living(self) -> Sequence[int]:
        """The ranks that live."""
        return self._ledger.living

    @property
    def num_sequences(self) -> int:
        """Sent and not ended."""
        return self._ledger.num_sequences

    def attach(self, rank: int, message: Attach) -> int:
        """Let another client talk to a rank's core. Returns its process's id."""
        core = self._cores[rank]
        core.send(message)
        return core.pid

    def detach(self, message: Detach) -> None:
        """A client has gone."""
        for rank in self._ledger.living:
            self._cores[rank].send(message)

    @property
    def num_others(self) -> int:
        """Sequences that other clients of the same cores have sent and that have not ended, as told last."""
        return self._ledger.num_others

    def cache_reset(self) -> None:
        """Another client has asked the cores to forget their prefix caches."""
        self._ledger.cache_reset()

    def stats(self) -> StepStats | None:
        """All ranks as one, as they told last; None before the first step."""
        return self._ledger.merged()

    def states(self) -> list[RankState]:
        """Of each rank; none before they are ready."""
        if not self._ready:
            return []
        ledger = self._ledger
        return [
            RankState(rank, core.pid, lives, *ledger.load(rank)[1:], ledger.stats(rank), lives and core.stopped())
            for rank, core in enumerate(self._cores)
            for lives in [ledger.lives(rank)]
        ]

    def alive(self) -> bool:
        """True while any of the processes runs."""
        return any(core.alive() for core in self._cores)

    def shutdown(self) -> None:
        """Stop all, at once, and wait until they have ended. Idempotent."""
        for restarts in self._restarts:
            restarts.stop()
        for core in self._cores:
            core.ask_to_stop()
        for core in self._cores:
            core.shutdown()
        for closing in self._closing:
            closing.join()
        for restarts in self._restarts:
            restarts.shutdown()


def _labelled(rank: int, deliver: Callable[[RankNews], None]) -> Callable[[FromCore | EngineError], None]:
    return lambda news: deliver(RankNews(rank, news))


def _hand_over(
    loop: asyncio.AbstractEventLoop, take: Callable[[Sequence[RankNews]], None], news: Sequence[RankNews]
) -> None:
    """Call `take(news)` in the loop, unless it has closed."""
    with contextlib.suppress(RuntimeError):  # the program has ended; there is nobody to tell
        loop.call_soon_threadsafe(take, news)


def _is_dead(output: CoreOutput) -> bool:
    return output.error is not None and output.error[0] == EngineDeadError.code


def _last_words(outputs: Sequence[CoreOutput]) -> CoreOutput | None:
    """The output of a sequence that ended because its engine core has died."""
    return next((output for output in outputs if output.error is not None and _is_dead(output)), None)
