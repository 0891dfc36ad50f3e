"""Routers with one planted fault each, in the places of the reference drivers' bodies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mutant_suites import suites_of

from engine_parallel.routers.least_loaded import LeastLoaded
from engine_parallel.routers.prefix_aware import PrefixAware
from engine_sdk.conformance import RouterConformance


class PlaceNotNumber(LeastLoaded):
    """the place in the list is answered, not the rank's number"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        chosen = super().route(requests, ranks)
        return [rank.rank for rank in ranks].index(chosen)


class RemembersTheDead(LeastLoaded):
    """ranks are taken in turn, whether they live or not"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        self._last = (self._last + 1) % self._num_ranks
        return self._last


class MostLoaded(LeastLoaded):
    """the rank with the most to do takes the request"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return max(ranks, key=lambda rank: (rank.num_waiting, rank.num_running, rank.kv_usage)).rank


class AlwaysTheFirst(LeastLoaded):
    """the first rank that lives takes everything"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return ranks[0].rank


class IgnoresWaiting(LeastLoaded):
    """what waits is not counted: a burst goes to one rank"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return min(ranks, key=lambda rank: (rank.num_running, rank.rank)).rank


class DrawsByChance(LeastLoaded):
    """a rank is drawn by chance"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return random.choice(ranks).rank


class ChangesRequests(LeastLoaded):
    """the prompt is cut where the router looks at it"""

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        del requests[0].prompt_token_ids[64:]
        return super().route(requests, ranks)


class SortsRanks(LeastLoaded):
    """the list of ranks is sorted in place"""

    def route(self, requests: Sequence[Any], ranks: Any) -> int:
        ranks.sort(key=lambda rank: rank.num_waiting)
        return ranks[0].rank


class NeverAgain(LeastLoaded):
    """a rank that died gets no work when another core stands in its place"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._dead: set[int] = set()

    def rank_died(self, rank: int) -> None:
        self._dead.add(rank)

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return super().route(requests, [rank for rank in ranks if rank.rank not in self._dead] or ranks)


class DiesOnce(PrefixAware):
    """a rank may die once only"""

    def rank_died(self, rank: int) -> None:
        self._held[rank] = None

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        return super().route(requests, [rank for rank in ranks if self._held[rank.rank] is not None])


class FollowsBlindly(PrefixAware):
    """every prompt is taken to be known to the rank that took the last one"""

    _last = None

    def route(self, requests: Sequence[Any], ranks: Sequence[Any]) -> int:
        living = [rank.rank for rank in ranks]
        self._last = self._last if self._last in living else super().route(requests, ranks)
        return self._last


LOAD_MUTANTS = [
    PlaceNotNumber, RemembersTheDead, MostLoaded, AlwaysTheFirst, IgnoresWaiting, DrawsByChance, ChangesRequests,
    SortsRanks, NeverAgain,
]  # fmt: skip
PREFIX_MUTANTS = [DiesOnce, FollowsBlindly]
MUTANTS = [*LOAD_MUTANTS, *PREFIX_MUTANTS]

globals().update(suites_of(RouterConformance, "least_loaded", LOAD_MUTANTS))
globals().update(suites_of(RouterConformance, "prefix_aware", PREFIX_MUTANTS))
