"""The scheduler half of `mooncake`. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.pages import places_of
from engine_connectors.store_scheduler import StoreScheduler
from engine_mooncake.pool import Client, MooncakeDirectory

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class MooncakeScheduler(StoreScheduler):
    """Asks the master in a thread."""

    def __init__(self, context: CoreContext) -> None:
        client = Client(context.options, segment_size=0)
        super().__init__(context, MooncakeDirectory(client, places_of(context.parallel)), waits=True)
