"""Behind the attention of its last layer, a step computes what will be read alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.modeling import GatedMLP

SETTINGS: dict[str, Any] = {
    "model": "dummy:0.6B,layers=2,vocab=300", "dtype": "float32", "attention": "torch", "ops": "torch",
    "platform": "host", "num_kv_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64,
}  # fmt: skip
PROMPTS: list[Any] = [{"prompt_token_ids": [i + 1 for i in range(length)]} for length in (20, 7, 100)]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each feed-forward block was given, one after the other."""
    seen: list[int] = []
    real = GatedMLP.__call__

    def counting(self: GatedMLP, x: Any) -> Any:
        seen.append(len(x))
        return real(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", counting)
    return seen


def tokens(params: SamplingParams, **more: Any) -> list[list[int]]:
    with LLM(**SETTINGS | more) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_last_layer_computes_the_rows_that_are_read(rows: list[int]) -> None:
    """One a prompt that is through; all of them where their scores are asked for, with the same tokens."""
    few = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    found = tokens(few)
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert any(first > 20 and last <= 3 for first, last in pairs), pairs
    rows.clear()
    scored = tokens(SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0))
    assert all(first == last for first, last in zip(rows[::2], rows[1::2], strict=True))
    assert scored == found


def test_drafts_are_read_too(rows: list[int]) -> None:
    """Of a prompt and of rows that verify drafts, in one step."""
    few = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = tokens(few)
    drafts = {"drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1}
    assert tokens(few, **drafts) == plain
