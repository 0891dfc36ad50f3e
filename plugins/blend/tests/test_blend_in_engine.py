"""Blending under any schedule: prompts in chunks, beside others, preempted, over ranks; and what it must not touch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_oracles import DOCUMENTS, FIRST, OTHER, QUESTION, SEPARATOR, SETTINGS

from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.kv.matching import Hit
from engine.scheduling.loading import Connectors

PROMPTS = [SEPARATOR.join([*DOCUMENTS[: 1 + i % 3], f"{QUESTION} {word}"]) for i, word in enumerate("abcdefghi")]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=36, ignore_eos=True) for i in range(9)]
SMALL = {"num_kv_pages": 90, "max_num_batched_tokens": 24, "max_num_seqs": 5}


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def blending(ratio: float = 0.0, **settings: Any) -> LLM:
    return LLM(**{**SETTINGS, **settings}, evictor="cacheblend", options={"evictor": {"ratio": ratio}})


def kv_of(llm: LLM) -> KVManager:
    return llm.llm_engine.client.core.scheduler.kv  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param(SMALL, id="chunks"),
        pytest.param({**SMALL, "in_flight": 1}, id="one step in flight", marks=pytest.mark.slow),
        pytest.param({**SMALL, "swap_space": 1 << 24}, id="swapped", marks=pytest.mark.slow),
        pytest.param({**SMALL, "drafter": "ngram"}, id="with drafts", marks=pytest.mark.slow),
    ],
)
def test_chunks_at_their_own_places_change_nothing(
    settings: dict[str, Any], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prefixes are not found, reused documents stand where they stood, behind what stood before them: so not one
    bit that is left out differs, however prompts are cut, and whoever is preempted."""
    match = KVManager.match

    def nothing(self: KVManager, sequence: Any, most: int, *more: Any) -> Hit:
        return match(self, sequence, 0, *more)

    with monkeypatch.context() as patch, blending(**settings) as llm:
        patch.setattr(KVManager, "match", nothing)
        patch.setattr(Connectors, "lookup", lambda *args: None)  # nor has the host tier any
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        kv, scheduler = kv_of(llm), llm.llm_engine.client.core.scheduler  # type: ignore[attr-defined]
        scheduler.check_integrity()
        assert kv.reuses is not None and kv.reuses.num_tokens > 20 and not kv.pool.num_held
        assert scheduler.num_preemptions > 0 or "num_kv_pages" not in settings


def test_what_is_blended_is_nobody_elses() -> None:
    """It is not cached behind its prefix, and what was computed exactly is found as ever."""
    one = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(**SETTINGS) as llm:
        exact = llm.generate([OTHER], one, use_tqdm=False)[0].outputs[0].token_ids
    with blending(ratio=0.1) as llm:
        kv = kv_of(llm)
        llm.generate([SEPARATOR.join([*DOCUMENTS, QUESTION])], one, use_tqdm=False)
        cached = int(kv.pool.committed.sum())
        for _ in range(2):
            assert llm.generate([OTHER], one, use_tqdm=False)[0].num_cached_tokens < 5
            assert int(kv.pool.committed.sum()) == cached
        assert kv.reuses is not None and kv.reuses.num_tokens > 0
        found = llm.generate([{"prompt": OTHER, "cache_salt": "another"}], one, use_tqdm=False)[0]
        assert found.outputs[0].token_ids == exact, "another tenant's documents were reused"


def test_who_has_reused_a_page_that_is_forgotten_is_computed_again() -> None:
    """While it still reads the page, and when it has read it."""
    with blending(max_num_batched_tokens=24) as llm:
        llm.generate([FIRST], PARAMS[0], use_tqdm=False)
        engine, kv = llm.llm_engine, kv_of(llm)
        assert kv.reuses is not None
        engine.add_request("again", OTHER, PARAMS[0])
        while not kv.reuses._of_slot:
            engine.step()
        ((slot, reused),) = kv.reuses._of_slot.items()
        places = reused.source[np.argsort(reused.position)]
        first, *_, last = (places[places >= 0] // kv.block_size).astype(np.int32)
        assert kv.forget(np.array([last])) == [slot]
        while kv.reuses._of_slot:
            engine.step()
        assert kv.reuses.num_tokens and kv.forget(np.array([first])) == [slot]
        while engine.has_unfinished_requests():
            engine.step()
        assert kv.forget(np.array([first])) == [] and not kv.reuses._entered


def test_scores_of_prompts_are_exact() -> None:
    """Who wants those of all tokens reuses nothing."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with blending() as llm:
        first = llm.generate([OTHER], scored, use_tqdm=False)[0].prompt_logprobs
        llm.generate([SEPARATOR.join([*DOCUMENTS, QUESTION])], PARAMS[0], use_tqdm=False)
        again = llm.generate([OTHER], scored, use_tqdm=False)[0].prompt_logprobs
        values = [[next(iter(at.values())).logprob for at in of[1:]] for of in (first, again)]
        assert values[0] == pytest.approx(values[1], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"pipeline_parallel_size": 2}, "several pipeline stages"),
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"options": {"evictor": {"check_layer": 5}}}, "there is none of 6 layers left"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        LLM(**SETTINGS, evictor="cacheblend", **settings)


def test_sliding_windows_are_refused(windowed: str) -> None:
    """A page that has left a window is gone, and with it the document that it held a part of."""
    with LLM(**SETTINGS | {"model": windowed}) as llm:
        assert llm.generate(["Once"], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids, "the model itself is served"
    reason = r"(?s)MistralForCausalLM.*not all layers keep .* of every token: sliding windows.*name another evictor"
    with pytest.raises(ConfigError, match=reason):
        LLM(**SETTINGS | {"model": windowed}, evictor="cacheblend")


@pytest.mark.slow
def test_ranks_choose_alike() -> None:
    """Tokens over two ranks are those of one: deviations are added up before the choice."""
    first, greedy = SEPARATOR.join([*DOCUMENTS, QUESTION]), SamplingParams(temperature=0.0, max_tokens=20)
    answers = []
    for ranks in (1, 2):
        with blending(ratio=0.15, tensor_parallel_size=ranks) as llm:
            llm.generate([first], greedy, use_tqdm=False)
            output = llm.generate([OTHER], PARAMS[:1], use_tqdm=False)[0]
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
