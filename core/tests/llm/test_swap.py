"""Swapping as users meet it: settings that contradict each other, and outputs that do not change."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError, EngineError

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "dtype": "float64",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 128,
}
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=40, ignore_eos=True, logprobs=i % 3) for i in range(6)
]
PROMPTS = [f"{word} upon a time there was" for word in ("Once", "Twice", "Never", "Often", "Soon", "Late")]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS, num_kv_pages=400) as llm:
        found = tokens(llm)
        assert llm.llm_engine.stats().num_preemptions == 0
        return found


@pytest.mark.parametrize("changes", [{}, {"drafter": "ngram"}, {"long_prefill_token_threshold": 3}])
def test_a_crowded_cache_gives_the_same_tokens(expected: list[list[int]], changes: dict[str, Any]) -> None:
    with LLM(**SETTINGS, num_kv_pages=40, swap_space="64MiB", **changes) as llm:
        assert tokens(llm) == expected
        stats = llm.llm_engine.stats()
        assert stats.num_preemptions == stats.num_swap_preemptions > 0
        assert stats.swap_pages_used == stats.num_swapped == stats.pages_used == 0 < stats.swap_pages_total


def test_the_mode_can_be_named(expected: list[list[int]]) -> None:
    with LLM(**SETTINGS, num_kv_pages=40, preemption_mode="recompute") as llm:
        assert tokens(llm) == expected
        stats = llm.llm_engine.stats()
        assert stats.num_preemptions > 0 == stats.num_swap_preemptions
    with LLM(**SETTINGS, num_kv_pages=40, preemption_mode="swap", swap_space=2**26, kv_connector="host") as llm:
        assert llm.llm_engine.plan is not None
        chosen = [c.driver for c in llm.llm_engine.plan.start.worker.choices if c.point == "kv_connector"]
        assert chosen == ["host"] and llm.llm_engine.plan.start.preemption_mode == "swap"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemption_mode": "swap"}, "swap_space is 0"),
        ({"preemption_mode": "recompute", "swap_space": "1GiB"}, "need no swap space"),
        ({"preemption_mode": "sideways"}, "preemption_mode"),
        ({"swap_space": 4}, "it is in bytes, and one page"),
        ({"swap_space": -1}, "amount of memory"),
        ({"kv_connector": "host"}, "there is no swap space"),
        ({"kv_connector.x": "1"}, "no connector is named, and nothing is swapped"),
        ({"kv_connector": "hots", "swap_space": "1MiB"}, "host"),
        ({"swap_space": "900TiB"}, "allocate a swap space"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LLM(**SETTINGS, num_kv_pages=40, **changes)


def test_no_swap_space_is_no_space() -> None:
    from engine import EngineArgs

    assert EngineArgs(swap_space=0).swap_space == EngineArgs(swap_space="0").swap_space == 0
    with pytest.raises(ConfigError):
        EngineArgs(swap_space=False)
