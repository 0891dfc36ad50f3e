"""Point `router`: which of several engine cores (data-parallel ranks) takes a request.

Every rank holds the whole model and a KV cache of its own. A router decides once a request, in the frontend; what it
chose is not moved afterwards, but for requests of a rank that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    from engine.interfaces.context import RouterContext
    from engine.types.request import EngineRequest


@dataclass(frozen=True, kw_only=True)
class RouterNeed:
    """What the engine asks of a router.

    Args:
        num_ranks: engine cores, at least 2.
        enable_prefix_caching: whether ranks find prompts that begin alike in their caches.
    """

    num_ranks: int
    enable_prefix_caching: bool = True


class RouterCard(Card):
    """Describes a router. `unsupported` gets a `RouterNeed`."""


class RankLoad(NamedTuple):
    """What is known of a living rank when a request is to be sent.

    Args:
        rank: its number.
        num_running: sequences in its batch, as it told last.
        num_waiting: all its other unfinished sequences. The frontend counts what it sent, so that a request counts
            from the moment in which it is routed, long before the rank tells of it.
        kv_usage: part of its KV cache that requests held when it told last; 0 to 1.
    """

    rank: int
    num_running: int
    num_waiting: int
    kv_usage: float


class Router(Protocol):
    """Chooses ranks. All calls come from one thread, the one that takes requests: a call is to take well under a
    millisecond, and a few for a prompt of some ten thousand tokens."""

    def __init__(self, context: RouterContext) -> None: ...

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        """The rank that takes these requests.

        Args:
            requests: one, or the n samples of one prompt, which stay together because they share its pages. Read
                them, do not change them. They will be sent: a router may remember now what the rank will hold.
            ranks: those that live, at least two, by number. With one left nobody is asked.

        Returns `RankLoad.rank` of one of `ranks`. Anything else, and any exception, ends the requests with an error.
        """

    def rank_died(self, rank: int) -> None:
        """Forget this rank. Should it be offered again, another core with an empty cache stands in its place."""

    def cache_reset(self) -> None:
        """Every rank has forgotten its prefix cache."""
