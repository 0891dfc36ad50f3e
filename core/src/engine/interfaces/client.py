"""How a frontend reaches engine cores, wherever they run: `LLM`, `AsyncLLM` and API processes stand on this alone.

The engine brings the clients of one core, in the caller's thread or in another process. A client that makes one of
several data-parallel cores comes from a plugin, in the entry-point group `engine.client.v0`: a class that is built with
a `ClientContext`, and is a `RemoteClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine.interfaces.router import Router
    from engine.types.errors import EngineError
    from engine.types.messages import ToCore
    from engine.types.outputs import CoreOutputs, StepStats
    from engine.types.request import EngineRequest
    from engine.types.start import CoreStart, WorkerReady


class CoreState(NamedTuple):
    """One engine core, for monitors and routers.

    Args:
        dp_rank: its data-parallel rank, 0 where there is one core.
        pid: of its process.
        alive: whether requests are sent to it.
        num_running, num_waiting: sequences; what it has not told of yet counts as waiting.
        kv_usage: part of its KV cache in use; 0 to 1.
        stats: what it told last; of a dead one its counters.
        stopped: it lives, but the system has it or a worker of its stopped (SIGSTOP, a debugger): nothing is computed.
        error: why it died.
    """

    dp_rank: int
    pid: int
    alive: bool
    num_running: int
    num_waiting: int
    kv_usage: float
    stats: StepStats | None
    stopped: bool = False
    error: EngineError | None = None


class CoreClient(Protocol):
    """An engine core, or several as one. One thread at a time."""

    @property
    def worker(self) -> WorkerReady:
        """What the worker told when it was ready."""

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests that belong together, all or none of them.

        Raises the core's EngineError where it refuses one at once; a core elsewhere refuses by an output instead.
        EngineDeadError where none lives.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests in whatever state they are; unknown ids are passed over. No output need follow."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Ask the core, see `engine.loop.engine_core.EngineCore.call`; arguments and answer are plain data.

        Several cores answer with the sum of their statistics, with their lists as one (page maps by rank, answers of
        workers), and with the first of answers that are all alike.

        The future has an EngineError where one refuses, or died before it answered.
        """

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        """The next news of requests. A core in this thread makes a step; of one elsewhere they are waited for.

        Args:
            timeout: seconds to wait; None waits for ever. Nothing is returned when they are over.

        Raises EngineDeadError: the core or a worker has died.
        """

    def has_work(self) -> bool:
        """True while the core has unfinished requests, or steps whose results were not taken in."""

    @property
    def last_stats(self) -> StepStats | None:
        """What the core told last; None before the first step."""

    def states(self, look: bool = True) -> list[CoreState]:
        """Of each core, by rank; none before they are ready.

        Args:
            look: ask the system whether a process is stopped, which takes some 0.1 ms a process.
        """

    def shutdown(self) -> None:
        """Stop the cores and free what they hold. Idempotent, from any thread."""


class RemoteClient(CoreClient, Protocol):
    """Of cores in other processes, which step by themselves. `wait_ready` comes first; then news are either fetched
    with `receive`, or heard with `listen`."""

    def wait_ready(self) -> WorkerReady:
        """Wait until the core is ready. `shutdown`, from another thread, ends the wait.

        Raises the core's own EngineError, or EngineDeadError where it died or was shut down.
        """

    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        on_news: Callable[[Sequence[CoreOutputs]], None],
        on_death: Callable[[EngineError], None],
    ) -> None:
        """Begin to hand over news, in this loop, which runs this thread and makes all other calls.

        Args:
            loop: of sockets, as asyncio's own and uvloop's are.
            on_news: takes those of one step, or of several where the loop is behind; of none, where a core of several
                died or stands again.
            on_death: called once, with why the last core ended unasked.
        """

    def tell(self, message: ToCore, dp_rank: int | None = None) -> None:
        """Send a message that has no answer, to this core or to all."""

    @property
    def num_others(self) -> int:
        """Sequences of other clients of the same cores that have not ended, as told last."""

    def responds(self) -> bool:
        """False where nothing lives, or the system has stopped what does and no sign of life came for a while."""

    def cache_reset(self) -> None:
        """Another client has asked the cores to forget their prefix caches."""

    def alive(self) -> bool:
        """True while any of the processes runs."""

    def ask_to_stop(self) -> None:
        """The first half of `shutdown`, which does not wait. Idempotent."""


class OneCore(RemoteClient, Protocol):
    """Of a single core, for who makes one of several."""

    def fileno(self) -> int:
        """A descriptor that becomes readable after a `receive(0)` that found nothing, when there may be something."""

    @property
    def unfinished(self) -> Collection[str]:
        """The requests that were sent and have not ended, in that order."""


@dataclass(frozen=True, kw_only=True)
class ClientContext:
    """What a client of several cores is built with.

    Args:
        core: the start message of one, but for its place among them.
        num_cores: how many; at least 2.
        restarts: how often each is started again when it dies, while another lives.
        connect: makes the client of one core, whose process starts then; again where one has died.
        router: makes the router, when all cores are ready.
        owner: this process starts the cores, and tells the user of their deaths.
        at_end: to be called in `shutdown` when all cores have ended.
    """

    core: CoreStart
    num_cores: int
    restarts: int
    connect: Callable[[CoreStart], OneCore]
    router: Callable[[Sequence[WorkerReady]], Router]
    owner: bool = True
    at_end: Callable[[], None] | None = None
