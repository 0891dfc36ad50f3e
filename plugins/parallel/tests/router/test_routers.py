"""The builtin routers: how evenly they spread, what they follow, and what they forget."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.context import RouterContext
from engine.interfaces.router import RankLoad, Router, RouterNeed
from engine.plugin import Registry, load_body
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest

BLOCK = 4
REGISTRY = Registry.discover()


def make(name: str, num_ranks: int, cached_tokens: int = 1 << 20, **options: Any) -> Router:
    candidate = REGISTRY.find("router", name)
    card = REGISTRY.card(candidate)
    assert card.Options is not None
    context = RouterContext(
        num_ranks=num_ranks,
        max_num_seqs=256,
        block_size=BLOCK,
        cached_tokens=cached_tokens,
        options=card.Options(**options),
    )
    router: Router = load_body(card, candidate=candidate)(context)
    return router


def ask(tokens: list[int], salt: str | None = None) -> list[EngineRequest]:
    return [EngineRequest(request_id="r", prompt_token_ids=tokens, params=SamplingParams(), cache_salt=salt)]


def idle(num_ranks: int) -> list[RankLoad]:
    return [RankLoad(rank, 0, 0, 0.0) for rank in range(num_ranks)]


loads = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100), st.floats(0, 1)), min_size=2, max_size=6).map(
    lambda several: [RankLoad(rank, *load) for rank, load in enumerate(several)]
)


# -- least_loaded ------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(loads, st.floats(0, 100))
def test_least_loaded_takes_the_least(ranks: list[RankLoad], weight: float) -> None:
    chosen = make("least_loaded", len(ranks), kv_weight=weight).route(ask([1]), ranks)
    scores = [4 * rank.num_waiting + rank.num_running + weight * rank.kv_usage for rank in ranks]
    assert scores[chosen] == min(scores)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 100), st.sampled_from(["least_loaded", "prefix_aware"]))
def test_a_burst_is_spread_evenly(num_ranks: int, count: int, name: str) -> None:
    """Prompts that have nothing in common, before any rank has told anything."""
    router, waiting = make(name, num_ranks), Counter[int]()
    for i in range(count):
        ranks = [RankLoad(rank, 0, waiting[rank], 0.0) for rank in range(num_ranks)]
        waiting[router.route(ask([i] * 10), ranks)] += 1
    assert max(waiting.values()) - min(waiting[rank] for rank in range(num_ranks)) <= 1


def test_equal_ranks_take_turns() -> None:
    router = make("least_loaded", 3)
    assert [router.route(ask([1]), idle(3)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [router.route(ask([1]), [idle(3)[0], idle(3)[2]]) for _ in range(3)] == [0, 2, 0]


def test_a_fuller_cache_weighs() -> None:
    ranks = [RankLoad(0, 10, 0, 0.9), RankLoad(1, 20, 0, 0.1)]
    assert make("least_loaded", 2).route(ask([1]), ranks) == 1
    assert make("least_loaded", 2, kv_weight=0).route(ask([1]), ranks) == 0


# -- prefix_aware ------------------------------------------------------------------------------------------------------
def test_a_conversation_stays_where_its_prefix_is() -> None:
    router = make("prefix_aware", 4)
    first = [router.route(ask([tenant] * 40), idle(4)) for tenant in range(4)]
    assert sorted(first) == [0, 1, 2, 3], "prompts without a common prefix spread over the caches"
    for turn in range(1, 5):
        for tenant in range(4):
            assert router.route(ask([tenant] * 40 + [9] * 8 * turn), idle(4)) == first[tenant]


@settings(deadline=None)
@given(loads, st.lists(st.integers(0, 2), min_size=8, max_size=40), st.floats(0, 50), st.floats(0, 2))
def test_no_rank_gets_further_ahead_than_the_slack(
    ranks: list[RankLoad], tokens: list[int], slack: float, ratio: float
) -> None:
    router = make("prefix_aware", len(ranks), slack=slack, slack_ratio=ratio, kv_weight=32)
    scores = [4 * rank.num_waiting + rank.num_running + 32 * rank.kv_usage for rank in ranks]
    for _ in range(3):
        chosen = router.route(ask(tokens), ranks)
        assert scores[chosen] <= min(scores) + max(slack, ratio * min(scores))


def test_load_goes_before_a_prefix() -> None:
    router = make("prefix_aware", 2)
    prompt = ask([5] * 40)
    home = router.route(prompt, idle(2))
    other = 1 - home
    busy = [RankLoad(rank, 0, 8 if rank == home else 0, 0.0) for rank in range(2)]
    assert router.route(prompt, busy) == home, "8 waiting are 32: just within the slack"
    busy = [RankLoad(rank, 1, 8 if rank == home else 0, 0.0) for rank in range(2)]
    assert router.route(ask([6] * 40), busy) == other
    too_busy = [RankLoad(rank, 0, 9 if rank == home else 0, 0.0) for rank in range(2)]
    assert router.route(prompt, too_busy) == other
    assert router.route(prompt, idle(2)) in (home, other), "now both hold it"


def test_little_in_common_is_not_followed() -> None:
    router = make("prefix_aware", 2, min_match=0.5)
    home = router.route(ask([7] * 40), idle(2))
    loads = [RankLoad(rank, 1 if rank == home else 0, 0, 0.0) for rank in range(2)]
    assert router.route(ask([7] * 16 + [8] * 24), loads) == 1 - home
    assert router.route(ask([7] * 24 + [9] * 16), loads) == home


def test_salts_share_nothing() -> None:
    router = make("prefix_aware", 2)
    home = router.route(ask([7] * 40, "a"), idle(2))
    loads = [RankLoad(rank, 1 if rank == home else 0, 0, 0.0) for rank in range(2)]
    assert router.route(ask([7] * 40, "b"), loads) == 1 - home
    assert router.route(ask([7] * 40, "a"), loads) == home


def test_death_and_reset_are_forgotten() -> None:
    router = make("prefix_aware", 3)
    home = router.route(ask([7] * 40), idle(3))
    loads = [RankLoad(rank, 1 if rank == home else 0, 0, 0.0) for rank in range(3)]
    router.rank_died(home)
    assert router.route(ask([7] * 40), [load for load in loads if load.rank != home]) != home
    router.cache_reset()
    assert router.route(ask([7] * 40), loads) != home


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), max_size=60), st.integers(1, 120))
def test_memory_is_bounded_and_what_is_held_is_what_lru_would_hold(prompts: list[list[int]], cached: int) -> None:
    """Against a model: an ordered list of prefixes, the whole prompt touched from its end to its beginning."""
    router = make("prefix_aware", 2, cached_tokens=cached)
    capacity = max(1, cached // BLOCK)
    model: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    for tokens in prompts:
        paths = [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        expected = {
            rank: next((i for i, path in enumerate(paths) if path not in held), len(paths))
            for rank, held in model.items()
        }
        chosen = router.route(ask(tokens), idle(2))
        if paths and max(expected.values()) >= 0.1 * len(paths):
            assert expected[chosen] == max(expected.values())
        held = model[chosen]
        for path in reversed(paths[:capacity]):
            if path in held:
                held.remove(path)
            held.append(path)
        del held[: max(0, len(held) - capacity)]
        assert [len(index) for index in router._held] == [len(model[0]), len(model[1])]  # type: ignore[attr-defined]


def test_what_it_cannot_do() -> None:
    card = REGISTRY.card(REGISTRY.find("router", "prefix_aware"))
    assert card.unsupported(RouterNeed(num_ranks=2)) == []
    (reason,) = card.unsupported(RouterNeed(num_ranks=2, enable_prefix_caching=False))
    assert "prefix caching is off" in reason


@pytest.mark.parametrize("option", ["kv_weight", "slack", "min_match"])
def test_options_have_ranges(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        make("prefix_aware", 2, **{option: -1})
