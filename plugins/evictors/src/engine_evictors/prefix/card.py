"""The card of `prefix`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.evictor import EvictorCard


class PrefixOptions(BaseModel):
    """Options of `prefix`.

    Attributes:
        share_weight: how long a shared page outlives its last use for each sequence that branched off after it, in
            turnovers of the cache (releases of as many pages as the cache has); 0 orders leaves by age alone.
        share_limit: branches above this add nothing, so that a prompt that was popular once goes some day.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share_weight: float = Field(default=1.0, ge=0.0, le=1e6)
    share_limit: int = Field(default=16, ge=1)


class PrefixEvictor(EvictorCard):
    """Leaf first over the tree of cached prefixes; what many sequences share stays longer."""

    priority = -10  # chosen by name: its gain depends on the traffic, and it costs more than `lru` a page
    Options = PrefixOptions
    body = "engine_evictors.prefix.body:Prefix"
