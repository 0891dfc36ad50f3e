"""The worker half of `redis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.redis.server import RedisStore, Server
from engine_connectors.store_worker import StoreWorker, place_of

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class RedisWorker(StoreWorker):
    """Exchanges whole pages with the server in threads."""

    def __init__(self, context: WorkerContext) -> None:
        options = context.options
        store = RedisStore(Server(options), place_of(context), options.ttl)
        super().__init__(store, options.threads, options.buffer)
