"""The scheduler half of `lmcache`. No torch, until the library brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.pages import places_of
from engine_connectors.store_scheduler import StoreScheduler
from engine_lmcache.remote import Client, LMCacheDirectory

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class LMCacheScheduler(StoreScheduler):
    """Asks the store in a thread."""

    def __init__(self, context: CoreContext) -> None:
        client = Client(context.options, context.layout.page_bytes)
        super().__init__(context, LMCacheDirectory(client, places_of(context.parallel)), waits=True)
