"""The suite of point `router`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np
import pytest

from engine.interfaces.router import RankLoad, Router, RouterNeed
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.core_contexts import router_context
from engine_sdk.conformance.timing import median_seconds


class RouterConformance(Conformance):
    """A living rank is chosen, whatever the loads; work that has nothing in common spreads; nothing is changed."""

    point = "router"
    protocol = "Router"

    @classmethod
    def needs(cls) -> Sequence[RouterNeed]:
        return [RouterNeed(num_ranks=n, enable_prefix_caching=caching) for n in (2, 8) for caching in (True, False)]

    @classmethod
    def make(cls, num_ranks: int) -> Router:
        """A router of so many ranks; skipped where the card does not serve them."""
        cls.require(RouterNeed(num_ranks=num_ranks))
        return cls.body()(router_context(cls.subject(), num_ranks))  # type: ignore[no-any-return]

    @pytest.mark.parametrize("num_ranks", [2, 3, 16])
    def test_one_of_the_living(self, num_ranks: int) -> None:
        """Of any ranks that are left, under any load, for prompts of any length and siblings."""
        router, random = self.make(num_ranks), np.random.default_rng(num_ranks)
        for turn in range(300):
            living = sorted(random.choice(num_ranks, random.integers(2, num_ranks + 1), replace=False).tolist())
            ranks = [_load(r, random, 65) for r in living]
            siblings = requests_of(turn, int(random.integers(1, 300)), int(random.choice([1, 1, 3])))
            before = [request.prompt_token_ids[:] for request in siblings], copy.deepcopy(ranks)
            chosen = router.route(siblings, ranks)
            assert type(chosen) is int and chosen in living, f"{chosen!r} is none of {living}"
            assert ([request.prompt_token_ids for request in siblings], ranks) == before, "it changes what it is shown"
            if turn % 40 == 39:
                router.rank_died(living[0])
            if turn % 60 == 59:
                router.cache_reset()

    def test_the_same_calls_give_the_same_ranks(self) -> None:
        """Two routers that hear the same decide the same."""
        routers, random = [self.make(4), self.make(4)], np.random.default_rng(3)
        for turn in range(100):
            ranks = [_load(r, random, 9) for r in range(4)]
            request = requests_of(turn % 7, 100, 1)
            first, second = (router.route(request, ranks) for router in routers)
            assert first == second

    def test_an_idle_rank_takes_what_is_new(self) -> None:
        """A prompt that nobody knows does not go to a rank that drowns in work, wherever the idle one stands."""
        for idle in range(4):
            router = self.make(4)
            for turn in range(8):
                ranks = [
                    RankLoad(r, 0 if r == idle else 64, 0 if r == idle else 500, 0.9 * (r != idle)) for r in range(4)
                ]
                assert router.route(requests_of(100 * idle + turn, 200, 1), ranks) == idle

    def test_work_spreads(self) -> None:
        """Prompts that have nothing in common, counted as they are sent: no rank is far ahead, none is left out."""
        router, waiting = self.make(4), [0] * 4
        for turn in range(400):
            ranks = [RankLoad(r, 0, waiting[r], 0.0) for r in range(4)]
            waiting[router.route(requests_of(turn, 160, 1), ranks)] += 1
        assert min(waiting) >= 50 and max(waiting) <= 200, waiting

    def test_a_rank_that_died_comes_back(self) -> None:
        """Another core stands in its place, and gets work again."""
        router = self.make(2)
        ranks = [RankLoad(0, 0, 0, 0.0), RankLoad(1, 0, 0, 0.0)]
        for turn in range(20):
            router.route(requests_of(turn, 160, 1), ranks)
        router.rank_died(1)
        router.rank_died(1)
        loaded = [RankLoad(0, 64, 300, 0.9), RankLoad(1, 0, 0, 0.0)]
        assert router.route(requests_of(999, 160, 1), loaded) == 1

    @classmethod
    def figure(cls) -> str | None:
        """What a decision costs."""
        if cls.subject().reasons(RouterNeed(num_ranks=8)):
            return None
        router, ranks = cls.make(8), [RankLoad(r, r, r, 0.1 * r) for r in range(8)]
        short, long = requests_of(1, 500, 1), requests_of(2, 20_000, 1)
        times = [median_seconds(functools.partial(router.route, given, ranks)) for given in (short, long)]
        return f"8 ranks, a prompt of 500 tokens: {times[0] * 1e6:.0f} us, of 20,000: {times[1] * 1e6:,.0f} us"


def _load(rank: int, random: np.random.Generator, most: int) -> RankLoad:
    running, waiting = random.integers(0, most, 2).tolist()
    return RankLoad(rank, running, waiting, float(random.random()))


def requests_of(seed: int, length: int, siblings: int) -> list[EngineRequest]:
    """The siblings of one prompt; another seed's has nothing in common with it."""
    prompt = np.random.default_rng(seed).integers(0, 32_000, length).tolist()
    return [
        EngineRequest(
            request_id=f"{seed}-{i}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=4),
            parent=str(seed) if siblings > 1 else None,
        )
        for i in range(siblings)
    ]  # fmt: skip
