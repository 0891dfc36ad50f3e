"""The worker half of `lmcache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.store_worker import StoreWorker, place_of
from engine_lmcache.remote import Client, LMCacheStore

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class LMCacheWorker(StoreWorker):
    """Exchanges whole pages with the store in threads."""

    def __init__(self, context: WorkerContext) -> None:
        options = context.options
        client = Client(options, context.start.layout.page_bytes)
        super().__init__(LMCacheStore(client, place_of(context)), options.threads, options.buffer)
