"""The scheduler half of `redis`. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.pages import places_of
from engine_connectors.redis.server import RedisDirectory, Server
from engine_connectors.store_scheduler import StoreScheduler

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class RedisScheduler(StoreScheduler):
    """Asks the server in a thread."""

    def __init__(self, context: CoreContext) -> None:
        directory = RedisDirectory(Server(context.options), places_of(context.parallel))
        super().__init__(context, directory, waits=True)
