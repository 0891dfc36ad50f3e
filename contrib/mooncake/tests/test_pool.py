"""Pages in a real Mooncake Store, whose master may go away, fill up, and know what nobody of ours has written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mooncake_master import SEGMENT, Master, why_not

from engine import LLM, SamplingParams
from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, page_key
from engine_mooncake import pool
from engine_mooncake.card import MooncakeOptions
from engine_mooncake.pool import Client, MooncakeDirectory, MooncakeStore, name_of

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

PAGE_BYTES = 1000
FIRST = Place()
KEYS = [page_key(b"identity", 0, bytes([number])) for number in range(40)]


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.end()


@pytest.fixture
def client(master: Master) -> Iterator[Client]:
    made = connected(master)
    yield made
    made.close()


def connected(master: Master, segment_size: int = SEGMENT) -> Client:
    return Client(MooncakeOptions(master=master.address), segment_size)


def page(number: int, size: int = PAGE_BYTES) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def found(store: MooncakeStore, number: int) -> bool:
    into = np.zeros(PAGE_BYTES, np.uint8)
    (there,) = store.get([KEYS[number]], [into])
    assert not there or np.array_equal(into, page(number))
    return there


def test_pages_of_two_ranks(client: Client, master: Master) -> None:
    """The second brings no memory of its own."""
    guest = connected(master, 0)
    first, second = MooncakeStore(client, FIRST), MooncakeStore(guest, Place(1, 0))
    directory = MooncakeDirectory(guest, [FIRST, Place(1, 0)])
    assert directory.has([]) == []
    assert first.put(KEYS[:3], [page(0), page(1), page(2)]) == [True] * 3
    assert [found(first, number) for number in range(4)] == [True, True, True, False]
    assert not found(second, 0) and directory.has(KEYS[:2]) == [False, False]
    assert second.put(KEYS[:1], [page(0)]) == [True] and found(second, 0)
    assert directory.has(KEYS[:2]) == [True, False]
    first.touch(KEYS[:3])
    assert first.counts() == {"damaged": 0, "refused": 0, "unreachable": 0}
    guest.close()


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "renamed"])
def test_damaged_objects_are_counted_and_removed(client: Client, damage: str) -> None:
    store, raw = MooncakeStore(client, FIRST), client._store
    store.put(KEYS[10:12], [page(10), page(11)])
    name = name_of(KEYS[10], FIRST)
    value = bytearray(raw.get(name))
    if damage == "cut":
        del value[-1]
    elif damage == "longer":
        value += b"x"
    elif damage == "flipped":
        value[FRAME_BYTES + 500] ^= 1
    else:
        value = bytearray(raw.get(name_of(KEYS[11], FIRST)))
    raw.remove(name, True)
    raw.put(name, bytes(value))
    assert not found(store, 10) and found(store, 11)
    assert store.counts()["damaged"] == 1
    assert store.put(KEYS[10:11], [page(10)]) == [True] and found(store, 10), "it is computed and kept again"


def test_a_full_store(client: Client) -> None:
    """While what it holds is in use it takes no more; later that makes room."""
    store, large = MooncakeStore(client, FIRST), page(0, 1 << 20)
    kept = [store.put([key], [large])[0] for key in KEYS[:20]]
    assert kept[0] and not kept[-1] and store.counts()["refused"] == kept.count(False)
    until = time.monotonic() + 20
    while not store.put(KEYS[39:], [page(39)])[0]:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert found(store, 39)


def test_a_master_that_is_gone_is_a_miss_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    master = Master()
    client = connected(master)
    store, directory = MooncakeStore(client, FIRST), MooncakeDirectory(client, [FIRST])
    store.put(KEYS[:1], [page(0)])
    master.end()
    assert directory.has(KEYS[:2]) == [False, False] and not found(store, 0)
    assert store.put(KEYS[:1], [page(0)]) == [False] and store.counts()["unreachable"] == 1, "it is left alone"
    assert "does not answer" in caplog.text
    monkeypatch.setattr(pool, "_PAUSE_SECONDS", 0.0)
    client._paused_until = 0.0
    master.start()
    until = time.monotonic() + 60
    while not store.put(KEYS[1:2], [page(1)])[0]:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert found(store, 1)
    client.close()
    master.end()


def test_an_engine_whose_segment_is_gone_is_a_miss(master: Master) -> None:
    owner, guest = connected(master), connected(master, 0)
    assert MooncakeStore(owner, FIRST).put(KEYS[20:21], [page(20)]) == [True]
    store = MooncakeStore(guest, FIRST)
    assert found(store, 20)
    owner.close()
    assert not found(store, 20)
    guest.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:50051"])
def test_a_master_that_does_not_answer_is_refused_at_start(address: str) -> None:
    with pytest.raises(ConfigError, match=r"the master does not answer.*mooncake_master"):
        Client(MooncakeOptions(master=address, timeout=2.0), 0)


# -- in engines --------------------------------------------------------------------------------------------------------
SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "block_size": 4, "max_num_seqs": 4}
BEGIN = "Once upon a time there was a little girl who lived in a house near the big forest with her mother"
PROMPTS = [BEGIN + end for end in (" and", " but one day", ". She", " who")]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]


def tokens(llm: LLM) -> tuple[list[list[int]], int]:
    """The outputs', and how many of the prompts' tokens were not computed."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [one.outputs[0].token_ids for one in outputs], sum(one.num_cached_tokens for one in outputs)


def test_an_engine_finds_what_another_left(client: Client, master: Master) -> None:
    """In memory that neither has brought; and one of another dtype finds nothing."""
    with LLM(**SETTINGS) as llm:
        expected, _ = tokens(llm)
    options = {"kv_connector": {"master": master.address, "segment_size": 0}}
    with LLM(**SETTINGS, kv_connector="mooncake", options=options) as first:
        assert tokens(first)[0] == expected
    with LLM(**SETTINGS, kv_connector="mooncake", options=options) as second:
        found, cached = tokens(second)
        assert found == expected and cached >= 4 * (len(BEGIN.split()) - 4)
    with LLM(**SETTINGS | {"dtype": "float32"}, kv_connector="mooncake", options=options) as other:
        other.generate(PROMPTS[:1], PARAMS[:1], use_tqdm=False)
        assert not any(count for *_, count in other.llm_engine.stats().kv_connectors)


def test_marks_go_through_the_store(client: Client, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """--kv-canary is silent over what is right, and finds a page that was changed before the store made its frame."""
    options = {"kv_connector": {"master": master.address, "segment_size": 0}}
    chosen: dict[str, Any] = {"kv_connector": "mooncake", "options": options, "kv_canary": True}
    client._store.remove_all(True)
    with LLM(**SETTINGS) as llm:
        expected, _ = tokens(llm)
    with LLM(**SETTINGS, **chosen) as first:
        assert tokens(first)[0] == expected
    with LLM(**SETTINGS, **chosen) as second:
        assert tokens(second)[0] == expected and canary(second)["checked"] > 0 == canary(second)["mismatches"]
    client._store.remove_all(True)
    put = MooncakeStore.put

    def changed(self: MooncakeStore, keys: Any, pages: Any) -> list[bool]:
        for page in pages:
            page[5] ^= 4  # in the buffer, where it lies for the store alone
        return put(self, keys, pages)

    with monkeypatch.context() as patch, LLM(**SETTINGS, **chosen) as first:
        patch.setattr(MooncakeStore, "put", changed)
        assert tokens(first)[0] == expected and not canary(first)["mismatches"]
    with LLM(**SETTINGS, **chosen) as second:
        assert tokens(second)[0] == expected and canary(second)["mismatches"] > 0


def canary(llm: LLM) -> dict[str, int]:
    return {event: count for driver, event, count in llm.llm_engine.stats().kv_connectors if driver == "canary"}
