"""The rank with the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from engine_parallel.routers.load import load_of

if TYPE_CHECKING:
    from engine.interfaces.context import RouterContext
    from engine.interfaces.router import RankLoad
    from engine.types.request import EngineRequest
    from engine_parallel.routers.card import LoadOptions


class LeastLoaded:
    """See `engine.interfaces.router.Router`. Among ranks with equal load it takes turns."""

    def __init__(self, context: RouterContext) -> None:
        self._kv_weight = cast("LoadOptions", context.options).kv_weight
        self._num_ranks = context.num_ranks
        self._last = context.num_ranks - 1

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        best = min(ranks, key=lambda rank: (load_of(rank, self._kv_weight), self._turn(rank)))
        self._last = best.rank
        return best.rank

    def rank_died(self, rank: int) -> None:
        """Nothing is kept of it but, perhaps, that it had the last turn."""

    def cache_reset(self) -> None:
        """Nothing is kept of caches."""

    def _turn(self, rank: RankLoad) -> int:
        """The rank after the last one is first."""
        return (rank.rank - self._last - 1) % self._num_ranks
