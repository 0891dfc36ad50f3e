"""`--kv-canary` in engines that share a store: it is silent over what is right, and finds what no checksum of the store
can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis_server import Process, command

from engine import LLM, SamplingParams
from engine_connectors.file.folder import FolderStore
from engine_connectors.redis.server import RedisStore
from engine_kit.prompt_sources import prompt_sources

NO_SERVER = pytest.mark.skipif(command() is None, reason="redis-server, or the client library redis, is not installed")
SETTINGS: dict[str, Any] = {
    "model": "tiny", "dtype": "float64", "block_size": 4, "max_num_seqs": 4, "max_model_len": 128, "num_kv_pages": 100
}  # fmt: skip
PROMPTS = ["Once upon a time there was a little girl who lived near the big forest" + end for end in (" and", ". She")]
PARAMS = [SamplingParams(temperature=0.8 * i, seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
STORES = {"file": FolderStore, "redis": RedisStore}


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm)


@pytest.fixture(params=["file", pytest.param("redis", marks=NO_SERVER)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A driver and its options."""
    if request.param == "file":
        yield "file", {"path": str(tmp_path)}
        return
    server = Process(tmp_path)
    yield "redis", {"url": server.url}
    server.end()


def opened(shared: tuple[str, dict[str, Any]]) -> LLM:
    driver, options = shared
    return LLM(**SETTINGS, kv_connector=driver, kv_canary=True, options={"kv_connector": options})


def canary(llm: LLM) -> dict[str, int]:
    return {event: count for driver, event, count in llm.llm_engine.stats().kv_connectors if driver == "canary"}


def test_marks_go_through_a_store(shared: tuple[str, dict[str, Any]], expected: list[list[int]]) -> None:
    with opened(shared) as llm:
        assert tokens(llm) == expected and canary(llm)["stamped"] > 0
    with opened(shared) as llm:
        assert tokens(llm) == expected
        counts, sources = canary(llm), prompt_sources(llm.llm_engine.stats())
        assert counts["checked"] > 0 and not counts["mismatches"] and sources[shared[0]] > sources["computed"]


def test_a_page_that_was_changed_before_it_was_kept_is_found(
    shared: tuple[str, dict[str, Any]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame is of what is there, so the store believes it."""
    store = STORES[shared[0]]
    put = store.put

    def changed(self: Any, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        pages = [page.copy() for page in pages]
        for page in pages:
            page[5] ^= 4
        return put(self, keys, pages)

    with monkeypatch.context() as patch, opened(shared) as llm:
        patch.setattr(store, "put", changed)
        assert tokens(llm) == expected and not canary(llm)["mismatches"]
    with opened(shared) as llm:
        assert tokens(llm) == expected
        counts = {event: count for driver, event, count in llm.llm_engine.stats().kv_connectors if driver == shared[0]}
        assert canary(llm)["mismatches"] > 0 and not counts["damaged"]
        assert llm.llm_engine.stats().pages_used == 0
