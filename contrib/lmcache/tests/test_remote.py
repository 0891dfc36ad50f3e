"""Pages in stores behind LMCache, which may go away, answer late, and hold what nobody of ours has written."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmcache_stores import AnyStore, Double, Folder, Server, those
from pydantic import ValidationError

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, page_key
from engine_lmcache import remote
from engine_lmcache.card import LMCacheOptions
from engine_lmcache.remote import Client, LMCacheDirectory, LMCacheStore, name_of

PAGE_BYTES = 1000
FIRST = Place()
KEYS = [page_key(b"identity", 0, bytes([number])) for number in range(60)]


@pytest.fixture
def client(kept_in: AnyStore) -> Iterator[Client]:
    made = connected(kept_in)
    yield made
    made.close()


def connected(store: AnyStore, timeout: float = 5.0) -> Client:
    return Client(LMCacheOptions(url=store.url, timeout=timeout), PAGE_BYTES)


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8)


def found(store: LMCacheStore, number: int) -> bool:
    into = np.zeros(PAGE_BYTES, np.uint8)
    (there,) = store.get([KEYS[number]], [into])
    assert not there or np.array_equal(into, page(number))
    return there


def test_pages_of_two_ranks(kept_in: AnyStore, client: Client) -> None:
    guest = connected(kept_in)
    first, second = LMCacheStore(client, FIRST), LMCacheStore(guest, Place(1, 0))
    directory = LMCacheDirectory(guest, [FIRST, Place(1, 0)])
    assert directory.has([]) == []
    assert first.put(KEYS[:3], [page(0), page(1), page(2)]) == [True] * 3
    assert [found(first, number) for number in range(4)] == [True, True, True, False]
    assert not found(second, 0) and directory.has(KEYS[:2]) == [False, False]
    assert second.put(KEYS[:1], [page(0)]) == [True] and found(second, 0)
    assert directory.has(KEYS[:2]) == [True, False]
    first.touch(KEYS[:3])
    assert first.counts() == {"damaged": 0, "refused": 0, "unreachable": 0}
    guest.close()


def test_many_at_once(client: Client) -> None:
    """Pages that are written and read by several threads are not mixed up."""
    store, numbers = LMCacheStore(client, FIRST), range(20, 60)

    def there(number: int) -> bool:
        store.put([KEYS[number]], [page(number)])
        some = [KEYS[number], KEYS[number - 10], KEYS[59 - number + 20]]
        into = [np.zeros(PAGE_BYTES, np.uint8) for _ in some]
        answers = store.get(some, into)
        for answer, one, own in zip(answers, into, (number, number - 10, 79 - number), strict=True):
            assert not answer or np.array_equal(one, page(own))
        return answers[0]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(there, numbers))
    assert store.counts() == {"damaged": 0, "refused": 0, "unreachable": 0}


@pytest.mark.parametrize("damage", ["flipped", "renamed"])
def test_damaged_objects_are_counted_and_computed_again(client: Client, damage: str) -> None:
    store = LMCacheStore(client, FIRST)
    store.put(KEYS[10:12], [page(10), page(11)])
    names = [name_of(key, FIRST) for key in KEYS[10:12]]
    objects = client.ask(lambda raw: raw.get(names), 2)
    content = (objects[0] if damage == "flipped" else objects[1]).copy()
    if damage == "flipped":
        content[FRAME_BYTES + 500] ^= 1
    assert client.ask(lambda raw: raw.put(names[:1], [content]), 1) == [True]
    assert not found(store, 10) and found(store, 11)
    assert store.counts()["damaged"] == 1
    assert store.put(KEYS[10:11], [page(10)]) == [True] and found(store, 10), "it is computed and kept again"


@pytest.mark.parametrize("kept_in", those("folder"), indirect=True)
def test_a_file_that_is_cut_is_a_miss(kept_in: Folder, client: Client) -> None:
    store = LMCacheStore(client, FIRST)
    kept_in.clear()
    store.put(KEYS[12:13], [page(12)])
    (file,) = kept_in.files()
    file.write_bytes(file.read_bytes()[:-1])
    assert not found(store, 12)
    assert store.put(KEYS[12:13], [page(12)]) == [True] and found(store, 12)


@pytest.mark.parametrize("kept_in", those("double", "lm server", "redis"), indirect=True)
def test_a_store_that_is_gone_is_a_miss_until_it_is_back(
    kept_in: Double | Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = connected(kept_in)
    store, directory = LMCacheStore(client, FIRST), LMCacheDirectory(client, [FIRST])
    store.put(KEYS[:1], [page(0)])
    kept_in.stop()
    assert directory.has(KEYS[:2]) == [False, False] and not found(store, 0)
    assert store.put(KEYS[:1], [page(0)]) == [False] and store.counts()["unreachable"] == 1, "it is left alone"
    assert "does not answer" in caplog.text
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.0)
    client._paused_until = 0.0
    kept_in.start()
    until = time.monotonic() + 30
    while not store.put(KEYS[1:2], [page(1)])[0] or not found(store, 1):
        assert time.monotonic() < until
        time.sleep(0.05)
    client.close()


def test_an_answer_that_comes_too_late_writes_to_no_page() -> None:
    with Double(Path()) as kept_in:
        client = connected(kept_in, timeout=0.2)
        store, into = LMCacheStore(client, FIRST), np.zeros(PAGE_BYTES, np.uint8)
        store.put(KEYS[:1], [page(0)])
        slow = kept_in.slow = threading.Event()
        assert store.get(KEYS[:1], [into]) == [False] and store.counts()["unreachable"] == 1
        slow.set()
        client._paused_until = 0.0
        assert found(store, 0) and not into.any()
        client.close()


def test_nothing_is_left_of_a_client_that_is_closed_while_it_asks() -> None:
    before = set(threading.enumerate())
    with Double(Path()) as kept_in:
        client = connected(kept_in, timeout=0.2)
        slow = kept_in.slow = threading.Event()
        asking = threading.Thread(target=found, args=(LMCacheStore(client, FIRST), 0))
        asking.start()
        client.close()
        asking.join(20)
        slow.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
            assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("kept_in", those("double", "folder"), indirect=True)
@pytest.mark.parametrize("url", ["lm://127.0.0.1:1", "redis://127.0.0.1:1", "nowhere://127.0.0.1:1"])
@pytest.mark.usefixtures("kept_in")
def test_a_store_that_is_none_is_refused_at_start(url: str) -> None:
    """By the double, and by the library."""
    with pytest.raises(ConfigError, match=r"it does not answer: .*kv_connector\.config"):
        Client(LMCacheOptions(url=url, timeout=2.0), PAGE_BYTES)


@pytest.mark.parametrize("kept_in", those("double"), indirect=True)
@pytest.mark.usefixtures("kept_in")
def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Client(LMCacheOptions(url="nowhere://ada:secret@127.0.0.1:1/0", timeout=2.0), PAGE_BYTES)
    assert caught.value.asked.endswith("kv_connector.url=nowhere://127.0.0.1:1/0")


@pytest.mark.parametrize("said", ["cannot reach redis://ada:s%21t@x:1/0", "ada:s%21t@x:1 is down", "AUTH s!t failed"])
@pytest.mark.parametrize("kept_in", those("double"), indirect=True)
@pytest.mark.usefixtures("kept_in")
def test_a_password_is_not_shown_in_the_librarys_words(
    said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and later."""

    async def fails(*_: Any) -> Any:
        raise RuntimeError(said)

    client = Client(LMCacheOptions(url="double://ada:s%21t@127.0.0.1:1/0", timeout=2.0), PAGE_BYTES)
    assert client.ask(fails, 1) == [None]
    client.close()
    monkeypatch.setattr(sys.modules["engine_lmcache.library"].Connection, "exists", fails)
    with pytest.raises(ConfigError) as caught:
        Client(LMCacheOptions(url="double://ada:s%21t@127.0.0.1:1/0", timeout=2.0), PAGE_BYTES)
    for text in (str(caught.value), caplog.text):
        assert "does not answer" in text and "s!t" not in text and "s%21t" not in text


def test_a_client_that_hangs_is_refused() -> None:
    with pytest.raises(ValidationError, match="write redis://"):
        LMCacheOptions(url="resp://127.0.0.1:6379")


# -- in engines --------------------------------------------------------------------------------------------------------
SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "block_size": 4, "max_num_seqs": 4}
BEGIN = "Once upon a time there was a little girl who lived in a house near the big forest with her mother"
PROMPTS = [BEGIN + end for end in (" and", " but one day", ". She", " who")]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]


def tokens(llm: LLM) -> tuple[list[list[int]], int]:
    """The outputs', and how many of the prompts' tokens were not computed."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [one.outputs[0].token_ids for one in outputs], sum(one.num_cached_tokens for one in outputs)


def test_an_engine_finds_what_another_left(kept_in: AnyStore) -> None:
    """Its pages are what they were, by their marks; and one of another dtype finds nothing."""
    with LLM(**SETTINGS) as llm:
        expected, _ = tokens(llm)
    chosen: dict[str, Any] = {"kv_connector": "lmcache", "options": {"kv_connector": {"url": kept_in.url}}}
    with LLM(**SETTINGS, **chosen, kv_canary=True) as first:
        assert tokens(first)[0] == expected
    with LLM(**SETTINGS, **chosen, kv_canary=True) as second:
        found, cached = tokens(second)
        assert found == expected and cached >= 4 * (len(BEGIN.split()) - 4)
        counts = {name: count for driver, name, count in second.llm_engine.stats().kv_connectors if driver == "canary"}
        assert counts["checked"] > 0 and counts["mismatches"] == 0
    with LLM(**SETTINGS | {"dtype": "float32"}, **chosen) as other:
        other.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        assert not any(count for *_, count in other.llm_engine.stats().kv_connectors)
