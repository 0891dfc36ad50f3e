"""Keys and values from elsewhere: two engines share a store, and their tokens are those of one that computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from thread_ranks import THREADS
from toy_store import Shelf, ToyScheduler

from engine import SamplingParams
from engine.config.settings import EngineConfig
from engine.errors import EngineError
from engine.llm import LLMEngine
from engine.plugin import Candidate, Registry
from engine.types.request import EngineRequest

TOY = Candidate("kv_connector", "toy", 1, "tests", "1.0", "toy_store:ToyCard")
LAYERWISE = Candidate("kv_connector", "layerwise", 1, "tests", "1.0", "toy_store:LayerwiseCard")
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "dtype": "float64",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "num_kv_pages": 120,
}
PREFIX = np.random.default_rng(1).integers(0, 200, 37).tolist()
PROMPTS = [PREFIX, [*PREFIX[:30], 5, 6, 7], [*PREFIX, *range(20)], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))
]


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    """Also where workers look for themselves."""
    discover = Registry.discover
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "discover", lambda **_: discover(extra=(TOY, LAYERWISE, THREADS)))
        yield


@pytest.fixture(autouse=True)
def _shelf() -> Iterator[None]:
    ToyScheduler.shelf = Shelf()
    yield
    ToyScheduler.shelf = Shelf()


def engine(**changes: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineConfig(**{**SETTINGS, **changes}), Registry.discover())


def run(llm: LLMEngine) -> tuple[list[list[int]], list[int]]:
    """Tokens of each prompt, and how many of its own were cached."""
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        llm.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    while llm.has_unfinished_requests():
        found.update({output.request_id: output for output in llm.step()})
    outputs = [found[str(i)] for i in range(len(PROMPTS))]
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def of_one(**changes: Any) -> tuple[list[list[int]], list[int]]:
    llm = engine(**changes)
    try:
        return run(llm)
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return of_one()[0]


CASES: dict[str, dict[str, Any]] = {
    "at once": {"kv_connector": "toy"},
    "by and by": {"kv_connector": "toy", "kv_connector.asynchronous": 1.0, "kv_connector.delay": 5},
    "with losses": {"kv_connector": "toy", "kv_connector.asynchronous": 0.5, "kv_connector.loss": 0.2},
    "asked again": {"kv_connector": "toy", "kv_connector.later": 0.7},
    "by layers": {"kv_connector": "layerwise"},
    "with drafts": {"kv_connector": "toy", "drafter": "ngram"},
    "one step at a time": {"kv_connector": "toy", "in_flight": 1},
    "two ranks": {
        "kv_connector": "toy",
        "kv_connector.asynchronous": 1.0,
        "kv_connector.delay": 5,
        "tensor_parallel_size": 2,
        "executor": "threads",
    },
    "with a swap tier": {"kv_connector": "toy,host", "swap_space": "1MiB"},
}


@pytest.fixture(scope="module")
def filled(expected: list[list[int]]) -> Shelf:
    """What one engine has saved."""
    ToyScheduler.shelf = Shelf()
    assert of_one(kv_connector="toy")[0] == expected
    return ToyScheduler.shelf


@pytest.mark.parametrize("case", CASES)
def test_a_second_engine_finds_what_the_first_has_computed(expected: list[list[int]], filled: Shelf, case: str) -> None:
    ToyScheduler.shelf.pages.update(filled.pages)
    ToyScheduler.shelf.keys.update(filled.keys)
    if case in ("by layers", "two ranks"):
        ToyScheduler.shelf = Shelf()
        assert of_one(**CASES[case])[0] == expected
    tokens, cached = of_one(**CASES[case])
    assert tokens == expected
    if case != "with losses":
        assert cached == [36, 32, 56, 8], "whole blocks up to the last token"


@pytest.mark.parametrize("case", ["at once", "by and by", "with drafts", "two ranks", "with a swap tier"])
def test_pages_are_what_their_marks_say(expected: list[list[int]], case: str) -> None:
    settings = {**CASES.get(case, {"kv_connector": "toy"}), "kv_canary": True, "num_kv_pages": 40}
    assert of_one(**settings)[0] == expected
    llm = engine(**settings)
    assert run(llm)[0] == expected
    counts = {name: count for connector, name, count in llm.stats().kv_connectors if connector == "canary"}
    llm.shutdown()
    assert counts["stamped"] > 20 and counts["checked"] > 20 and counts["mismatches"] == counts["stolen"] == 0


def test_another_identity_finds_nothing(filled: Shelf) -> None:
    ToyScheduler.shelf = filled
    _, cached = of_one(kv_connector="toy", block_size=8)
    assert cached[0] == 0


def test_what_cannot_be_is_refused() -> None:
    for changes, found in (
        ({"kv_connector": "toy", "enable_prefix_caching": False}, "prefix cache"),
        ({"kv_connector": "toy", "swap_space": "1MiB"}, "keep(s) no pages"),
        ({"kv_connector": "host"}, "there is no swap space"),
        ({"kv_connector": "layerwise", "kv_canary": True}, "without the marks behind them"),
        ({"kv_canary": True, "enable_prefix_caching": False}, "marks are made of blocks' keys"),
    ):
        with pytest.raises(EngineError, match=found.replace("(", r"\(").replace(")", r"\)")):
            engine(**changes)


def test_pages_are_held_for_whoever_fetches_them() -> None:
    llm = engine(**{"kv_connector": "toy", "kv_connector.held": 30.0})
    core = llm.client.core  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, seed=0, max_tokens=1)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=PREFIX, params=params, kv_transfer={"for": "b"}))
    outputs, pool = [], core.scheduler.kv.pool
    while not outputs or outputs[-1].finish_reason is None:
        outputs += core.step().outputs
    assert outputs[-1].kv_transfer == {"pages": 10} and pool.num_held == 10 and len(pool.leases) == 1
    deadline = time.monotonic() + 20
    while core.has_work():
        core.step()
        assert time.monotonic() < deadline
    assert pool.num_held == 0 and not pool.leases
    llm.shutdown()


def test_an_abort_while_pages_travel_keeps_them_until_they_are_there(filled: Shelf) -> None:
    ToyScheduler.shelf = filled
    llm = engine(**{"kv_connector": "toy", "kv_connector.asynchronous": 1.0, "kv_connector.delay": 30})
    core = llm.client.core  # type: ignore[attr-defined]
    llm.add_request("a", {"prompt_token_ids": PREFIX}, PARAMS[0])
    llm.step()
    pool = core.scheduler.kv.pool
    assert list(core.scheduler.connectors.waiting) == ["a"] and pool.num_held == 9
    llm.abort_request(["a"])
    assert not core.scheduler.requests and pool.num_held == 9
    while core.has_work():
        core.step()
    assert pool.num_held == 0
    core.check_integrity()
    llm.shutdown()
