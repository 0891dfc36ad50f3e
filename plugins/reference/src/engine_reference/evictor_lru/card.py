"""The card of evictor `lru`."""

from __future__ import annotations

from engine.interfaces.evictor import EvictorCard


class LRUEvictor(EvictorCard):
    """Gives up the pages that were released longest ago; of one sequence, its end first."""

    body = "engine_reference.evictor_lru.body:LRU"
