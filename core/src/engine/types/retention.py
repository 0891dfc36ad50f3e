"""What a request says of its KV cache."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec


class KVRetention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes of a request's KV cache when it has ended: `kv_retention`. Its pages are found as any others, and
    given up after all that nobody retains, within the operator's bounds.

    Args:
        ttl: for how many seconds; None: 300, and pinned pages until they are released.
        priority: pages of a lower one are given up first.
        pin: they are given up after those of any priority.
        release: nothing of this request is retained, nor any more what earlier ones with its key retained that it goes
            on from.
        session: a name; what earlier requests of this key and session retained, and this one does not, is released.
        tokens: of its beginning, in whole blocks; None: all of it, the answer too.
        key: in whose name, within whose bound; None: in that of its `cache_salt`.
        hint: an engine that cannot retain takes the request all the same.
    """

    MOST_PRIORITY: ClassVar[int] = 100

    ttl: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    pin: bool = False
    release: bool = False
    session: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    key: str | None = None
    hint: bool = False

    def __post_init__(self) -> None:
        if self.release and (self.ttl is not None or self.priority or self.pin or self.tokens is not None):
            raise ValueError("release goes with no ttl, priority, pin or tokens")
        if self.pin and self.priority:
            raise ValueError("pin is above every priority: send one of them")
