"""`LLM(drafter="ngram")`: the same outputs in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.types.errors import OptionsError, PluginError

PROMPTS = ["one two three one two three one two", "Grüße 你好", "la la la la la la la", "x"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=40, logprobs=3, frequency_penalty=0.3, n=2),
    SamplingParams(temperature=0.4, top_k=3, seed=6, max_tokens=50, min_tokens=20, repetition_penalty=0.8),
    SamplingParams(temperature=0.3, top_k=2, seed=7, max_tokens=50, stop=["e", "a"], min_tokens=8, logprobs=0),
]
SIZES = {"max_num_seqs": 4, "num_kv_pages": 200, "max_model_len": 128, "dtype": "float64"}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("llm")


def outcomes(llm: LLM) -> list[object]:
    return [
        (c.text, c.token_ids, c.finish_reason, c.stop_reason, None if c.logprobs is None else len(c.logprobs))
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for c in output.outputs
    ]


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_outputs_are_those_without_a_drafter(folder: Path, in_flight: int) -> None:
    with LLM(model=folder, **SIZES) as plain:
        expected = outcomes(plain)
    options = {"drafter.num_tokens": 6, "drafter.min_match": 1}
    with LLM(model=folder, drafter="ngram", in_flight=in_flight, **options, **SIZES) as llm:
        assert outcomes(llm) == expected
        assert outcomes(llm) == expected, "and again, with the prompts in the prefix cache"


def steps(folder: Path, **settings: object) -> tuple[int, list[int], tuple[int, int]]:
    """The steps, the tokens and (drafts, accepted) of one greedy request that soon repeats itself."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=folder, **SIZES, **settings))
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, frequency_penalty=-2.0)
        engine.add_request("one", "la la la la la la", greedy)
        while engine.has_unfinished_requests():
            last = engine.step()
        stats = engine.stats()
        return stats.step_id, last[0].outputs[0].token_ids, (stats.num_drafts, stats.num_accepted_drafts)
    finally:
        engine.shutdown()


def test_a_repetitive_text_takes_fewer_steps_than_tokens(folder: Path) -> None:
    plain, expected, none = steps(folder)
    assert plain == len(expected) == 100 and none == (0, 0)
    few, tokens, (drafted, accepted) = steps(folder, drafter="ngram", **{"drafter.cost": 0.05})
    assert tokens == expected
    assert few + accepted == 100 and 0 < accepted <= drafted
    assert few < 60


def test_bad_options_are_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match="num_tokens"):
        LLM(model=folder, drafter="ngram", **{"drafter.num_tokens": 0})
    with pytest.raises(PluginError, match="ngrm"):
        LLM(model=folder, drafter="ngrm")
