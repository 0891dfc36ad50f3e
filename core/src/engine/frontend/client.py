"""The frontend's side of an engine core: one Protocol, and the client of a core in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.types.outputs import CoreOutputs, StepStats
from engine.types.request import EngineRequest
from engine.types.start import WorkerReady

if TYPE_CHECKING:
    from engine.loop.engine_core import EngineCore


class EngineClient(Protocol):
    """An engine core, wherever it runs. One thread at a time."""

    @property
    def worker(self) -> WorkerReady:
        """What the worker told when it was ready."""
        ...

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, all or none of them.

        Raises the core's EngineError where it refuses one at once; a core elsewhere refuses by an output instead.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests in whatever state they are; unknown ids are passed over. No output need follow."""
        ...

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        """The next news. A core in this process makes a step; of one elsewhere they are waited for.

        Args:
            timeout: seconds to wait; None waits for ever. Nothing is returned when they are over.

        Raises:
            EngineDeadError: the core or a worker has died.
        """
        ...

    def has_work(self) -> bool:
        """True while the core has unfinished requests, or steps whose results were not taken in."""
        ...

    def stats(self) -> StepStats:
        """The state of the core."""
        ...

    def shutdown(self) -> None:
        """Stop the core and free what it holds. Idempotent."""
        ...


class InProcessClient:
    """The core runs in the caller's thread: `receive` is one `EngineCore.step()`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def core(self) -> EngineCore:
        """What `receive` steps."""
        return self._core

    @property
    def worker(self) -> WorkerReady:
        return self._core.worker_ready

    def add(self, requests: Sequence[EngineRequest]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._core.add_request(request)
                added.append(request.request_id)
        except BaseException:
            self._core.abort(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        self._core.abort(list(request_ids))

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        return self._core.step()

    def has_work(self) -> bool:
        return self._core.has_work()

    def stats(self) -> StepStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()
