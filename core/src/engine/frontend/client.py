"""The engine core in the caller's thread, and how the clients of other cores are found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.interfaces.client import CoreState, OneCore
from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry, duplicate
from engine.plugin.hints import how_to_install
from engine.plugin.points import CLIENT
from engine.types.errors import DriverNotFoundError

if TYPE_CHECKING:
    from engine.loop.engine_core import EngineCore
    from engine.types.outputs import CoreOutputs, StepStats
    from engine.types.request import EngineRequest
    from engine.types.start import CoreStart, WorkerReady


class InProcessClient:
    """The core runs in the caller's thread: `receive` is one `EngineCore.step()`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    @property
    def worker(self) -> WorkerReady:
        return self.core.worker_ready

    def add(self, requests: Sequence[EngineRequest]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except BaseException:
            self.core.abort(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        self.core.abort(list(request_ids))

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(self.core.call(method, *args))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        return self.core.step()

    def has_work(self) -> bool:
        return self.core.has_work()

    @property
    def last_stats(self) -> StepStats:
        return self.core.stats()

    def states(self, look: bool = True) -> list[CoreState]:
        stats = self.last_stats
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        return [CoreState(0, os.getpid(), True, stats.num_running, stats.num_waiting, usage, stats)]

    def shutdown(self) -> None:
        self.core.shutdown()


@dataclass(frozen=True)
class Attached:
    """Cores that another process has started, for a process beside others that serves them too.

    Args:
        start: what they were started with, but for their places among each other.
        connect: makes the client of one; again where another stands in its place.
        first: this process tells hooks of the engine's statistics, which every process of several could tell.
    """

    start: CoreStart
    connect: Callable[[CoreStart], OneCore]
    first: bool = True


def client_of_several(registry: Registry) -> Candidate:
    """What makes one of several engine cores: the one that is installed, see `engine.interfaces.client`.

    Raises DriverNotFoundError where nothing does, DuplicateDriverError where two do.
    """
    found = registry.candidates(CLIENT)
    if not found:
        raise DriverNotFoundError(
            "serve with several engine cores (data_parallel_size)",
            "nothing that is installed makes one of them",
            how_to_install(CLIENT),
            point=CLIENT,
        )
    if len(found) > 1:
        raise duplicate(CLIENT, found)
    return found[0]
