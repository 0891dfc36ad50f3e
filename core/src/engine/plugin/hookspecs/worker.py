"""The hooks of the processes that compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugin.hookspecs.markers import observing

if TYPE_CHECKING:
    from engine.types.start import WorkerReady


class WorkerHooks:
    """Hooks of the processes that compute."""

    @observing
    def worker_started(self, info: WorkerReady) -> None:
        """A worker has loaded its weights and allocated its KV cache, and is about to report that it is ready.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            info: what the worker answers its start with: pages, bytes, parameters, seconds.
        Process: worker, on each rank.
        Thread: the worker's main thread.
        Cost: once a start; it delays the start.
        """

    @observing
    def worker_stopping(self, info: WorkerReady) -> None:
        """A worker that had started is about to let go of its model and its memory. Not called where it is killed.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            info: as it was told to `worker_started`.
        Process: worker, on each rank.
        Thread: the worker's main thread.
        Cost: once a stop; it delays the stop, and an executor that waits too long kills the worker.
        """
