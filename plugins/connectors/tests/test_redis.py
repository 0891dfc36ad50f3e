"""Pages in a real Redis server, which may go away, fill up, and hold what nobody of ours has written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_server import Process, command
from test_stores_in_engine import SETTINGS, divided, tokens

from engine import LLM
from engine.types.errors import ConfigError

redis = pytest.importorskip("redis", reason="the client library redis is not installed")

from engine_connectors.pages import Place, page_key  # noqa: E402
from engine_connectors.redis.card import RedisOptions  # noqa: E402
from engine_connectors.redis.server import RedisDirectory, RedisStore, Server, name_of  # noqa: E402

PAGE_BYTES = 1000
FIRST = Place()
KEYS = [page_key(b"identity", 0, bytes([number])) for number in range(40)]

pytestmark = pytest.mark.skipif(command() is None, reason="redis-server is not installed")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("redis"))
    yield process
    process.end()


@pytest.fixture
def server(shared: Process) -> Process:
    redis.Redis.from_url(shared.url).flushall()
    return shared


def page(number: int, size: int = PAGE_BYTES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def connected(process: Process) -> Server:
    return Server(RedisOptions(url=process.url, timeout=2.0))


def store(process: Process, place: Place = FIRST, ttl: int | None = None) -> RedisStore:
    return RedisStore(connected(process), place, ttl)


def found(one: RedisStore, number: int) -> bool:
    into = np.zeros(PAGE_BYTES, np.uint8)
    (there,) = one.get([KEYS[number]], [into])
    assert not there or np.array_equal(into, page(number))
    return there


def test_pages_of_two_ranks(server: Process) -> None:
    first, second = store(server), store(server, Place(1, 0))
    directory = RedisDirectory(connected(server), [Place(), Place(1, 0)])
    assert first.put(KEYS[:3], [page(0), page(1), page(2)]) == [True] * 3
    assert [found(first, number) for number in range(4)] == [True, True, True, False]
    assert not found(second, 0) and directory.has(KEYS[:2]) == [False, False]
    second.put(KEYS[:1], [page(0)])
    assert directory.has(KEYS[:2]) == [True, False]
    first.touch(KEYS[:3])
    assert first.counts() == {"damaged": 0, "refused": 0, "unreachable": 0}
    for one in (first, second, directory):
        one.close()


def test_pages_larger_than_an_exchange(server: Process) -> None:
    one, large = store(server), [page(number, 9 << 20) for number in range(3)]
    assert one.put(KEYS[:3], large) == [True] * 3
    into = [np.zeros(9 << 20, np.uint8) for _ in range(3)]
    assert one.get(KEYS[:3], into) == [True] * 3
    assert all(np.array_equal(a, b) for a, b in zip(into, large, strict=True))


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "a list"])
def test_damaged_values_are_counted_and_removed(server: Process, damage: str) -> None:
    one, client, name = store(server), redis.Redis.from_url(server.url), name_of(KEYS[0], FIRST)
    one.put(KEYS[:2], [page(0), page(1)])
    value = bytearray(client.get(name))
    if damage == "cut":
        client.set(name, bytes(value[:-1]))
    elif damage == "flipped":
        value[500] ^= 1
        client.set(name, bytes(value))
    elif damage == "foreign":
        client.set(name, os.urandom(len(value)))
    else:
        client.delete(name)
        client.lpush(name, "x")
    assert not found(one, 0) and found(one, 1)
    assert one.put(KEYS[:1], [page(0)]) == [True] and found(one, 0)


def test_a_server_that_is_gone_is_a_miss_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine_connectors.redis.server._PAUSE_SECONDS", 0.05)
    process = Process(tmp_path)
    one, directory = store(process), RedisDirectory(connected(process), [FIRST])
    one.put(KEYS[:1], [page(0)])
    process.end()
    assert directory.has(KEYS[:2]) == [False, False] and not found(one, 0)
    assert one.put(KEYS[:1], [page(0)]) == [False] and one.counts()["unreachable"] >= 1
    assert "does not answer" in caplog.text
    late = store(process)  # an engine that starts meanwhile
    process.start()
    time.sleep(0.06)
    assert one.put(KEYS[:1], [page(0)]) == [True] and found(late, 0) and directory.has(KEYS[:1]) == [True]
    process.end()


def test_a_full_server(tmp_path: Path) -> None:
    """By its policy it gives pages up, or takes no more."""
    process = Process(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
    one, large = store(process), page(0, 1 << 20)
    kept = [one.put([key], [large])[0] for key in KEYS[:20]]
    assert kept[0] and not kept[-1] and one.counts()["refused"] == kept.count(False)
    redis.Redis.from_url(process.url).config_set("maxmemory-policy", "allkeys-lru")
    assert all(one.put([key], [large]) == [True] for key in KEYS[20:])
    process.end()


def test_pages_are_forgotten_after_their_time(server: Process) -> None:
    one = store(server, ttl=100)
    one.put(KEYS[:1], [page(0)])
    assert 0 < redis.Redis.from_url(server.url).ttl(name_of(KEYS[0], FIRST)) <= 100


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(tmp_path, "--requirepass", "open sesame")
    with pytest.raises(ConfigError, match=r"the server refuses.*--kv-connector.password_variable"):
        connected(process)
    monkeypatch.setenv("STORE_PASSWORD", "open sesame")
    server = Server(RedisOptions(url=process.url, password_variable="STORE_PASSWORD"))
    one = RedisStore(server, FIRST, None)
    assert one.put(KEYS[:1], [page(0)]) == [True]
    process.end()


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match="give an address like"):
        Server(RedisOptions(url="localhost"))


def test_one_engine_computes_a_prompt_and_another_goes_on_by_the_server(server: Process) -> None:
    options = {"kv_connector": {"url": server.url}}
    with LLM(**SETTINGS) as alone:
        expected = tokens(alone)
    with (
        LLM(**SETTINGS, kv_connector="redis", options=options) as p,
        LLM(**SETTINGS, kv_connector="redis", options=options) as d,
    ):
        assert divided(p, d) == expected
