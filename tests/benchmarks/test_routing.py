"""The replay over simulated ranks, against the plain replay of one cache, and the routers against each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle

import pytest

from engine.interfaces.router import RankLoad
from engine.plugin import Registry
from engine.types.request import EngineRequest
from tests.benchmarks.__main__ import main
from tests.benchmarks.eviction import EvictorCache, Turn, build_evictor, hit_rate, make_trace
from tests.benchmarks.routing import (
    DECODE_SECONDS,
    PREFILL_SECONDS,
    SimulatedRank,
    build_router,
    make_arrivals,
    replay,
)

REGISTRY = Registry.discover()


def ranks(count: int, pages: int) -> list[SimulatedRank]:
    return [SimulatedRank(EvictorCache(build_evictor(REGISTRY, "lru", pages), pages), pages) for _ in range(count)]


class Turns:
    """A router that takes turns, and keeps the loads that it saw."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = cycle(range(num_ranks))
        self.seen: list[list[RankLoad]] = []

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        self.seen.append(list(ranks))
        return next(self.ranks)

    def rank_died(self, rank: int) -> None: ...

    def cache_reset(self) -> None: ...


def test_one_rank_is_the_plain_replay() -> None:
    trace = make_trace(3, tenants=5, conversations=80, blocks_of_system=8)
    arrivals = make_arrivals(trace, 1, 1.0, 3)
    outcome = replay(trace, arrivals, ranks(1, 300), Turns(1))
    cache = EvictorCache(build_evictor(REGISTRY, "lru", 300), 300)
    assert outcome.hit_rate == pytest.approx(hit_rate(trace, cache)) and outcome.imbalance == 1


def test_each_rank_replays_what_it_was_sent() -> None:
    trace = make_trace(4, tenants=5, conversations=80, blocks_of_system=8)
    outcome = replay(trace, make_arrivals(trace, 3, 1.0, 4), ranks(3, 300), Turns(3))
    prompts = [turn.num_prompt for turn in trace]
    hits = sum(
        hit_rate(trace[i::3], EvictorCache(build_evictor(REGISTRY, "lru", 300), 300)) * sum(prompts[i::3])
        for i in range(3)
    )
    assert outcome.hit_rate == pytest.approx(hits / sum(prompts))


def test_times_and_loads_by_hand() -> None:
    """Two requests of 4 blocks at once on one of two ranks, the third after the first has had its first token."""
    trace = [Turn((1, 2, 3, 4, 5), 4), Turn((6, 7, 8, 9, 10), 4), Turn((1, 2, 11, 12, 13), 4)]
    block = PREFILL_SECONDS
    router = Turns(1)  # always rank 0
    outcome = replay(trace, [0.0, 0.0, 5 * block], ranks(2, 11), router)
    first, second, third = 4 * block, 8 * block, (8 + 2 - 5) * block
    assert outcome.mean == pytest.approx((first + second + third) / 3)
    assert outcome.hit_rate == pytest.approx(2 / 12) and outcome.imbalance == 2
    assert [loads[0] for loads in router.seen] == [
        (0, 0, 0, 0.0), (0, 0, 1, pytest.approx(5 / 11)), (0, 1, 1, pytest.approx(10 / 11)),
    ]  # fmt: skip
    later = Turns(1)
    replay(trace[:2], [0.0, 4 * block + DECODE_SECONDS + 1e-6], ranks(2, 11), later)
    assert later.seen[1][0] == (0, 0, 0, 0.0), "it has ended"


@pytest.mark.parametrize("seed", range(3))
def test_what_routers_are_worth(seed: int) -> None:
    """Following prefixes comes near to one cache for all; going by load alone divides every prefix by the ranks."""
    trace = make_trace(seed, tenants=12, conversations=200)
    count, pages = 4, 400
    arrivals = make_arrivals(trace, count, 1.5, seed)
    found = {
        name: replay(trace, arrivals, ranks(count, pages), build_router(REGISTRY, name, count, pages))
        for name in ("least_loaded", "prefix_aware")
    }
    together = replay(trace, arrivals, ranks(1, count * pages), Turns(1)).hit_rate
    assert found["prefix_aware"].hit_rate > together - 0.08
    assert found["prefix_aware"].hit_rate > found["least_loaded"].hit_rate + 0.1
    assert found["prefix_aware"].mean < found["least_loaded"].mean
    assert found["prefix_aware"].imbalance < 1.5 and found["least_loaded"].imbalance < 1.2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--tenants", "4", "--conversations", "60", "--system-blocks", "6", "--ranks", "2", "--pages", "200"]
    assert main(["routing", *trace, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["hit_rate_least_loaded"] < figures["hit_rate_prefix_aware"] < 1
    assert main(["routing", *trace, "--routers", "least_loaded", "--evictor", "lru", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["hit_rate_least_loaded"] == figures["hit_rate_least_loaded"] and "hit_rate_prefix_aware" not in again
    assert main(["routing", "--pages", "5"]) == 2
    assert main(["routing", *trace, "--load", "0"]) == 2
    assert main(["routing", *trace, "--routers", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
