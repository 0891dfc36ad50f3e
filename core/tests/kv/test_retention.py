"""Requests that retain their KV cache: an agent that comes back after a flood, bounds, times, a pool that is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from cores import LAYOUTS, HandClock, make_core
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Settings

from engine.interfaces.context import CoreContext
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine.types.retention import KVRetention
from engine_evictors.prefix.body import Prefix
from engine_evictors.prefix.card import PrefixOptions
from engine_reference.evictor_lru import LRU

TINY = Settings(
    num_pages=1 + 40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=120, in_flight=2,
    enable_prefix_caching=True,
)  # fmt: skip
HISTORY = [5, *range(1, 40)]  # 10 blocks


class WithOptions(Prefix):
    def __init__(self, context: CoreContext) -> None:
        super().__init__(replace(context, options=PrefixOptions()))


class Server:
    """A core whose requests come one after the other."""

    def __init__(self, evictor: type = LRU, layout: str = "full", **of_kv: Any) -> None:
        self.clock = HandClock()
        self.core, _ = make_core(LAYOUTS[layout], TINY, evictor=evictor, clock=self.clock, **of_kv)
        self.count = 0

    def ask(self, prompt: list[int], *wishes: KVRetention, salt: str | None = None) -> int:
        """How many tokens of the prompt were found."""
        self.count += 1
        name = str(self.count)
        self.core.add_request(
            EngineRequest(
                request_id=name, prompt_token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=2, seed=0),
                cache_salt=salt, kv_retention=wishes,
            )
        )  # fmt: skip
        cached = 0
        while self.core.has_work():
            for output in self.core.step().outputs:
                assert output.error is None, output.error
                cached = max(cached, output.num_cached_tokens)
            self.core.check_integrity()
        return cached

    def flood(self, salt: str | None = None) -> None:
        """More prompts than the cache holds."""
        for i in range(8):
            self.ask([7, 8, 9, i + 1] * 8, salt=salt or f"flood{i}")

    @property
    def shown(self) -> dict[str, int]:
        """What monitors are told."""
        stats = self.core.stats()
        return dict(stats.retained_pages) | dict(stats.retention_events)


@pytest.fixture(params=[LRU, WithOptions], ids=["lru", "prefix"])
def evictor(request: pytest.FixtureRequest) -> type:
    return request.param


@pytest.mark.parametrize("layout", ["full", "full and sliding", "latent", "full and state"])
def test_an_agent_finds_its_history_after_a_flood(evictor: type, layout: str) -> None:
    """It waits for a tool meanwhile. Without retention nothing is left."""
    for wishes, found in (((), 0), ((KVRetention(ttl=60),), 40)):
        server = Server(evictor, layout, max_retention_per_key=0.5)
        server.ask(HISTORY, *wishes)
        server.flood()
        server.clock.now = 50.0
        assert server.ask([*HISTORY, 3, 2, 1], *wishes) >= found
        if not wishes:
            assert server.shown == {"expired": 0, "given_up": 0, "displaced": 0}


def test_time_ends_it(evictor: type) -> None:
    server = Server(evictor, max_retention_per_key=0.5)
    server.ask(HISTORY, KVRetention(ttl=60, priority=3))
    assert server.shown == {"3": 10, "expired": 0, "given_up": 0, "displaced": 0}
    server.clock.now = 60.0
    assert server.shown == {"expired": 10, "given_up": 0, "displaced": 0}
    server.flood()
    assert server.ask([*HISTORY, 3]) == 0


def test_release_ends_it_and_nobody_elses(evictor: type) -> None:
    server = Server(evictor, max_retention_per_key=0.5)
    shared, other = HISTORY[:20], [*HISTORY[:20], *[9] * 8]
    server.ask(HISTORY, KVRetention(ttl=60))
    server.ask(other, KVRetention(ttl=60))
    server.ask([*HISTORY, 3, 2, 1], KVRetention(release=True))
    assert server.shown["0"] == 7
    server.flood()
    assert server.ask([*other, 1]) == 28 and server.ask([*HISTORY, 3]) == len(shared)


def test_a_session_replaces_what_it_retained() -> None:
    """An answer that does not come back as it was, thoughts for example, is on no later prompt's way."""
    server = Server(max_retention_per_key=1.0, max_retention=1.0)
    server.ask(HISTORY, KVRetention(ttl=60, session="a"))
    server.ask([*HISTORY[:20], *[9] * 20], KVRetention(ttl=60, session="a"))
    assert server.shown["0"] == 10
    server.ask([2, 2, 2, 2], KVRetention(release=True, session="a"))
    assert "0" not in server.shown


def test_of_several_beginnings_each_has_its_time() -> None:
    server = Server(max_retention_per_key=0.5)
    server.ask(HISTORY, KVRetention(ttl=3600, tokens=17), KVRetention(ttl=60, tokens=40))
    assert server.shown["0"] == 10
    server.clock.now = 100.0
    assert server.shown["0"] == 4
    server.flood()
    assert server.ask([*HISTORY, 3]) == 16


def test_a_key_keeps_within_its_bound() -> None:
    """Its own weaker grants go; others' stay; a prompt that is longer is retained from its beginning."""
    server = Server(max_retention=0.5, max_retention_per_key=0.25)  # 20 and 10 pages
    server.ask([4] * 16, KVRetention(ttl=60), salt="b")
    server.ask(HISTORY[:24], KVRetention(ttl=60, priority=9), salt="a")
    server.ask([3] * 12, KVRetention(ttl=60), salt="a")
    server.ask([2] * 12, KVRetention(ttl=80), salt="a")
    assert server.shown == {"0": 7, "9": 6, "expired": 0, "given_up": 0, "displaced": 3}
    server.ask([1] * 60, KVRetention(pin=True), salt="a")
    assert server.shown["pinned"] == 10 and server.shown["0"] == 4
    server.flood()
    assert server.ask([4] * 17, salt="b") == 16 and server.ask([1] * 60, salt="a") == 40


def test_where_all_is_retained_who_has_most_gives() -> None:
    server = Server(max_retention=0.25, max_retention_per_key=0.25)
    server.ask([4] * 40, KVRetention(ttl=60, priority=100), salt="rich")
    server.ask([3] * 12, KVRetention(ttl=60), salt="poor")
    assert server.shown == {"0": 3, "expired": 0, "given_up": 0, "displaced": 10}


def test_pinned_pages_go_last_and_go_where_nothing_else_is_left(evictor: type) -> None:
    """A request that needs all pages gets them: no deadlock."""
    server = Server(evictor, max_retention=1.0, max_retention_per_key=1.0)
    server.ask(HISTORY, KVRetention(pin=True))
    server.ask([6] * 40, KVRetention(ttl=60, priority=100), salt="b")
    server.ask([9] * 70)
    assert server.shown["pinned"] == 10 and server.shown["100"] == 10
    server.ask([8] * 100)
    assert server.shown == {"pinned": 10, "100": 4, "expired": 0, "given_up": 6, "displaced": 0}
    server.ask([2] * 40, KVRetention(pin=True))
    server.ask([7] * 118)
    assert server.shown == {"pinned": 10, "expired": 0, "given_up": 20, "displaced": 0}
    assert server.ask([*[2] * 40, 1]) == 40 and server.ask([*HISTORY, 1]) == 0


def test_a_reset_forgets_it() -> None:
    server = Server()
    server.ask(HISTORY, KVRetention(ttl=60))
    server.core.reset_prefix_cache()
    server.core.check_integrity()
    assert server.shown == {"expired": 0, "given_up": 0, "displaced": 0}
    (pages,) = server.core.page_maps()
    assert not any(pages.retained)
    server.ask(HISTORY, KVRetention(ttl=60))
    (pages,) = server.core.page_maps()
    assert sum(pages.retained) == 10


def test_what_the_core_refuses() -> None:
    class Plain(LRU):
        retain = None  # type: ignore[assignment]

    for server, found in (
        (Server(Plain), "its evictor Plain retains nothing"),
        (Server(max_retention=0.0), "--max-kv-retention 0"),
    ):
        with pytest.raises(InvalidRequestError, match=found):
            server.ask(HISTORY, KVRetention(ttl=60))
        server.ask(HISTORY, KVRetention(ttl=60, hint=True))


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ({"ttl": 0}, "ttl"),
        ({"ttl": 1e9}, "ttl"),
        ({"ttl": "5m"}, "ttl"),
        ({"priority": 101}, "priority"),
        ({"pin": 1}, "pin"),
        ({"keep": True}, "keep"),
        ({"release": True, "ttl": 5}, "release goes with"),
        ({"pin": True, "priority": 5}, "pin is above"),
    ],
)
def test_what_no_wish_is(wish: dict[str, Any], found: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=found):
        msgspec.convert(wish, KVRetention)


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 3),
            st.integers(1, 6),
            st.sampled_from([KVRetention(ttl=5), KVRetention(ttl=9, priority=2), KVRetention(pin=True), None]),
        ),
        max_size=12,
    )
)
@hypothesis_settings(max_examples=25, deadline=None)
def test_bounds_hold_whoever_asks_for_what(turns: list[tuple[str, int, int, KVRetention | None]]) -> None:
    """`check_integrity` compares grants, pages and bounds after each step."""
    server = Server(max_retention=0.3, max_retention_per_key=0.2)
    for key, conversation, blocks, wish in turns:
        server.clock.now += 1.0
        server.ask([conversation + 1] * (4 * blocks + 1), *(() if wish is None else (wish,)), salt=key)
        assert sum(count for name, count in server.core.stats().retained_pages) <= 12


def test_nothing_is_counted_where_nobody_asks() -> None:
    server = Server()
    server.ask(HISTORY)
    assert not server.core.scheduler.kv.index.retention.of_pages().any() and server.core.stats().retained_pages == ()
