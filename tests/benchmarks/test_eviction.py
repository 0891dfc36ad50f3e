"""The replay against plain models of LRU, and the optimum against every way to evict."""

from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict

import pytest

from engine.plugin import Registry
from tests.benchmarks.__main__ import main
from tests.benchmarks.eviction import EvictorCache, OptimalCache, Turn, build_evictor, compare, hit_rate, make_trace


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


class PlainLRU:
    """Blocks in order of their last use; of one path the last blocks count as older."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks = OrderedDict[int, None]()

    def lookup(self, path: tuple[int, ...]) -> int:
        return next((i for i, block in enumerate(path) if block not in self.blocks), len(path))

    def insert(self, path: tuple[int, ...]) -> None:
        for block in path:
            self.blocks.pop(block, None)
        while len(self.blocks) + len(path) > self.room:
            self.blocks.popitem(last=False)
        self.blocks.update(dict.fromkeys(reversed(path)))


def test_lru_behind_the_interface_is_lru(registry: Registry) -> None:
    trace = make_trace(3, tenants=5, conversations=60, blocks_of_system=8)
    longest = max(len(turn.path) for turn in trace)
    for room in (longest, 2 * longest, 10 * longest):
        found = hit_rate(trace, EvictorCache(build_evictor(registry, "lru", room + 1), room + 1))
        assert found == pytest.approx(hit_rate(trace, PlainLRU(room)))


def test_traces_are_seeded_and_conversations_grow() -> None:
    trace = make_trace(7, conversations=40)
    assert trace == make_trace(7, conversations=40)
    assert trace != make_trace(8, conversations=40)
    prompts = {turn.path[: turn.num_prompt]: turn for turn in trace}
    continued = [p for p in prompts if any(p[: len(turn.path)] == turn.path for turn in trace)]
    assert len(continued) > len(trace) / 4
    assert all(0 < turn.num_prompt < len(turn.path) for turn in trace)


def test_the_optimum_is_the_best_of_all_ways() -> None:
    """Every subset that fits, after every turn, tried."""
    rng = random.Random(5)
    for _ in range(15):
        roots = [(1,), (2,), (3,)]
        trace = [Turn((*rng.choice(roots), 10 + i), 1) for i in range(5)]
        room = 3
        best = 0
        states = {frozenset[int](): 0}
        for turn in trace:
            after: dict[frozenset[int], int] = {}
            for cached, hits in states.items():
                hits += turn.path[0] in cached
                blocks = cached | set(turn.path)
                for kept in itertools.combinations(sorted(blocks), min(room, len(blocks))):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits)
            states = after
            best = max(states.values())
        assert hit_rate(trace, OptimalCache(trace, room + 1)) == pytest.approx(best / len(trace))


def test_no_driver_beats_the_optimum_and_a_roomy_cache_is_all_the_same(registry: Registry) -> None:
    trace = make_trace(1, tenants=6, conversations=80, blocks_of_system=10)
    distinct = len({block for turn in trace for block in turn.path})
    names = [candidate.name for candidate in registry.candidates("evictor")]
    rates = compare(trace, names, [150, 400, distinct + 1], registry)
    for name in names:
        assert all(rate <= best + 1e-12 for rate, best in zip(rates[name], rates["optimum"], strict=True)), name
        assert rates[name][-1] == pytest.approx(rates["optimum"][-1])
        assert rates[name] == sorted(rates[name])


def test_a_cache_that_is_too_small_says_so(registry: Registry) -> None:
    trace = make_trace(1, conversations=10)
    with pytest.raises(ValueError, match="does not fit"):
        hit_rate(trace, EvictorCache(build_evictor(registry, "lru", 4), 4))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--tenants", "4", "--conversations", "30", "--system-blocks", "6"]
    assert main(["eviction", "--drivers", "lru", "--pages", "200,400", *trace, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["hit_rate_lru_200"] <= figures["hit_rate_optimum_200"] <= figures["hit_rate_optimum_400"] < 1
    assert main(["eviction", "--pages", "5", *trace]) == 2
    assert main(["eviction", "--drivers", "nobody", *trace]) == 2
    assert "nobody" in capsys.readouterr().err
