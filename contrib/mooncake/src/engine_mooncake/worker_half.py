"""The worker half of `mooncake`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.store_worker import StoreWorker, place_of
from engine_mooncake.pool import Client, MooncakeStore

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import WorkerContext


class MooncakeWorker(StoreWorker):
    """Lets the library move pages between the store and the pool, or pinned memory beside a device, without a copy."""

    def __init__(self, context: WorkerContext) -> None:
        options = context.options
        self._client = Client(options, options.segment_size)
        super().__init__(MooncakeStore(self._client, place_of(context)), options.threads, options.buffer)

    def lend(self, memory: np.ndarray) -> None:
        """Register it, as RDMA needs."""
        self._client.register(memory)
