"""Blending beside KV connectors, and under `--kv-canary`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_blend_in_engine import blending, kv_of
from test_oracles import BEHIND_A_PREFIX, DOCUMENTS, FIRST, NEW, OTHER, QUESTION, SEPARATOR, SETTINGS

from engine import LLM, SamplingParams
from engine.kv.manager import KVManager
from engine.kv.matching import Hit
from engine.kv.reuse import Reuses
from engine.scheduling.loading import Connectors
from engine.types.errors import ContractError
from engine_kit.kv_canary import CanaryScheduler

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True)
PROMPTS = (FIRST, OTHER, NEW, BEHIND_A_PREFIX)


def one(llm: LLM, prompt: str) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt's were reused behind the prefix."""
    before = llm.llm_engine.stats().reused_tokens
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids, llm.llm_engine.stats().reused_tokens - before


def exact(prompt: str) -> list[int]:
    with LLM(**SETTINGS) as llm:
        return one(llm, prompt)[0]


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], int]]:
    """Without a connector, in this order."""
    with blending(0.15) as llm:
        answers = [one(llm, prompt) for prompt in PROMPTS]
    assert answers[0][1] == 0 and all(reused > 20 for _, reused in answers[1:])
    return answers


@pytest.mark.parametrize("connector", ["host", pytest.param("file", marks=pytest.mark.slow)])
def test_beside_a_connector_it_blends_as_alone(
    connector: str, alone: list[tuple[list[int], int]], tmp_path: Path
) -> None:
    """The store is full of what was computed exactly, and is asked before: nothing changes. What it has loaded of
    another engine's prompt is blended like what was computed here."""
    pytest.importorskip("engine_connectors")
    options = {"path": str(tmp_path)} if connector == "file" else {}
    settings: dict[str, Any] = {
        "kv_connector": connector,
        "kv_canary": True,
        **({"swap_space": 1 << 24} if connector == "host" else {}),
    }

    def opened() -> LLM:
        chosen = {"evictor": {"ratio": 0.15}, "kv_connector": options}
        return LLM(**SETTINGS, **settings, evictor="cacheblend", options=chosen)

    with opened() as llm:
        assert [one(llm, prompt) for prompt in PROMPTS] == alone
        llm.llm_engine.call("reset_prefix_cache")
        assert [one(llm, prompt) for prompt in (FIRST, OTHER)] == alone[:2]
        told = {event: n for name, event, n in llm.llm_engine.stats().kv_connectors if name == connector}
        assert told["hit_tokens"] > len(DOCUMENTS) * 10, "nothing was loaded"
        assert mismatches(llm) == 0
    if connector == "file":
        with opened() as llm:
            assert [one(llm, prompt) for prompt in (FIRST, OTHER)] == alone[:2]


def test_what_is_blended_is_in_no_store(alone: list[tuple[list[int], int]], tmp_path: Path) -> None:
    """An engine that shares the store computes the prompt exactly, from the prefix on."""
    pytest.importorskip("engine_connectors")
    chosen = {"kv_connector": "file", "options": {"kv_connector": {"path": str(tmp_path)}}}
    with blended_with(chosen) as llm:
        assert [one(llm, prompt) for prompt in (FIRST, OTHER)] == alone[:2]
    with LLM(**SETTINGS, **chosen) as llm:
        (output,) = llm.generate([OTHER], PARAMS, use_tqdm=False)
        assert output.num_cached_tokens < 5 and output.outputs[0].token_ids == exact(OTHER) != alone[1][0]


def blended_with(chosen: Mapping[str, Any]) -> LLM:
    options = {**chosen["options"], "evictor": {"ratio": 0.15}}
    return LLM(**SETTINGS, **{**chosen, "options": options}, evictor="cacheblend")


def test_behind_what_is_filled_at_once_nothing_is_blended() -> None:
    """As the operators' page says: the host tier fills a prefix in the step that computes the rest."""
    with blending(0.15, kv_connector="host", swap_space=1 << 24) as llm:
        one(llm, FIRST)
        llm.llm_engine.call("reset_prefix_cache")
        one(llm, SEPARATOR.join([DOCUMENTS[2], DOCUMENTS[1], QUESTION]))
        assert one(llm, BEHIND_A_PREFIX) == (exact(BEHIND_A_PREFIX), 0)


# -- the canary --------------------------------------------------------------------------------------------------------
def mismatches(llm: LLM) -> int:
    return sum(
        n for name, event, n in llm.llm_engine.stats().kv_connectors if (name, event) == ("canary", "mismatches")
    )


def wrong_page(patch: pytest.MonkeyPatch) -> None:
    """Once, blocks are said to lie where others do."""
    right, times = Reuses._pages_of, iter([True])

    def pages_of(self: Reuses, *args: Any) -> np.ndarray:
        pages = right(self, *args)
        if next(times, False):
            pages[1:-1] = pages[1:-1][::-1].copy()
        return pages

    patch.setattr(Reuses, "_pages_of", pages_of)


def spoilt_page(patch: pytest.MonkeyPatch) -> None:
    """Once, pages that are reused have been written to."""
    right, times = Reuses._pages_of, iter([True])

    def pages_of(self: Reuses, *args: Any) -> np.ndarray:
        pages = right(self, *args)
        if next(times, False):
            with torch.inference_mode():
                POOLS[-1][pages[1:-1].tolist()] = 0
        return pages

    patch.setattr(Reuses, "_pages_of", pages_of)


POOLS: list[Any] = []


@pytest.mark.parametrize("chunk", [512, 24])
@pytest.mark.parametrize("fault", [wrong_page, spoilt_page])
def test_wrong_source_pages_are_caught(fault: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents at their own places: so what is right is equal to the last bit."""
    from engine_kit.kv_canary_worker import CanaryWorker

    match, register, expected = KVManager.match, CanaryWorker.register, exact(FIRST)
    monkeypatch.setattr(KVManager, "match", lambda self, sequence, most, *more: nothing(match, self, sequence, *more))
    monkeypatch.setattr(Connectors, "lookup", lambda *args: None)

    def kept(self: CanaryWorker, pool: Any) -> None:
        POOLS.append(pool)
        register(self, pool)

    monkeypatch.setattr(CanaryWorker, "register", kept)

    def answers() -> tuple[list[list[int]], int]:
        with blending(0.0, kv_canary=True, max_num_batched_tokens=chunk) as llm, monkeypatch.context() as patch:
            first = one(llm, FIRST)[0]
            fault(patch)
            second, reused = one(llm, FIRST)
            assert reused > 20
            kv_of(llm).check_integrity()
            return [first, second], mismatches(llm)

    found, caught = answers()
    assert found == [expected, expected] and caught > 2
    if fault is wrong_page:  # what is spoilt, the end of the request that computed it finds too
        monkeypatch.setattr(CanaryScheduler, "reused", lambda *args: None)
        assert answers()[1] == 0, "somebody else has caught it"


def nothing(match: Any, kv: KVManager, sequence: Any, *more: Any) -> Hit:
    return match(kv, sequence, 0, *more)  # type: ignore[no-any-return]


def test_who_raises_over_what_is_reused_ends_that_request(
    alone: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*args: Any) -> None:
        raise RuntimeError("reused went off")

    with blending(0.15, kv_canary=True) as llm:
        assert one(llm, FIRST) == alone[0]
        with monkeypatch.context() as here:
            here.setattr(CanaryScheduler, "reused", raising)
            with pytest.raises(ContractError, match="kv_connector.*reused went off"):
                one(llm, OTHER)
        assert one(llm, OTHER)[0] == alone[1][0]
        kv_of(llm).check_integrity()
