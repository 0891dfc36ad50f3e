"""Requests that edit their logits, on the JAX worker: the tokens of the torch engine and its logits processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from jax_engines import VOCAB_SIZE, jax_engine, torch_engine, worker_of

from engine import SamplingParams
from engine.types.errors import InvalidRequestError
from engine.types.params import ThinkingBudget
from engine_tpu import edits

TOKENS = st.integers(0, VOCAB_SIZE - 1)
FEW = st.integers(0, 6)
"""Tokens that outputs are made of, where few are allowed: words of them occur."""
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(3, 24),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([[], [5, 6]]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "logprobs": st.sampled_from([None, 2]),
        "logit_bias": st.one_of(st.none(), st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=9)),
        "allowed_token_ids": st.one_of(st.none(), st.just(list(range(7)))),
        "bad_words_token_ids": st.lists(st.lists(FEW, min_size=1, max_size=4), max_size=5).map(
            lambda words: [word for word in words if len(word) > 1 or word[0] < 3]
        ),
        "thinking_budget": st.one_of(
            st.none(),
            st.builds(
                ThinkingBudget,
                tokens=st.integers(0, 12),
                end=st.lists(st.integers(7, VOCAB_SIZE - 1), min_size=1, max_size=3),  # no ends that min_tokens forbids
                begin=st.lists(FEW, max_size=1),
            ),
        ),
        "ignore_eos": st.just(True),
    }
)
ALL: dict[str, Any] = {
    "temperature": 0.9, "seed": 3, "max_tokens": 24, "ignore_eos": True, "logit_bias": {3: 4.0, 90: -100.0},
    "bad_words_token_ids": [[2], [3, 3], [1, 4, 0]], "allowed_token_ids": list(range(7)), "logprobs": 2,
    "thinking_budget": ThinkingBudget(tokens=5, end=[50, 51], begin=[]),
}  # fmt: skip


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)], ids=["short", "long"])
def test_edits_as_the_torch_engines(examples: int, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them, in batches with requests that ask for nothing, with drafts, and in several turns: the same tokens,
    and log probabilities of what the model said. Nothing is compiled in service."""
    monkeypatch.setattr(edits, "ADDED", 8)
    monkeypatch.setattr(edits, "CONDITIONS", 8)
    monkeypatch.setattr(edits, "ENDED", 1)
    folder = checkpoints("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    more = {"drafter": {"adaptive": "false", "num_tokens": "2"}}
    with torch_engine(folder) as other, jax_engine(folder, more_options=more, drafter="ngram") as mine:

        @example([(9, ALL), (3, {**ALL, "temperature": 0.0, "allowed_token_ids": None}), (5, {"max_tokens": 9})], 0)
        @given(st.lists(st.tuples(st.integers(1, 30), PARAMS), min_size=1, max_size=6), st.integers(0, 9))
        @settings(
            max_examples=examples, deadline=None, derandomize=examples < 10, suppress_health_check=list(HealthCheck)
        )
        def run(requests: list[tuple[int, dict[str, Any]]], number: int) -> None:
            rng = np.random.default_rng(number)
            prompts = [{"prompt_token_ids": rng.integers(0, VOCAB_SIZE, n).tolist()} for n, _ in requests]
            params = [SamplingParams(**{"temperature": 0.0, **one}) for _, one in requests]
            try:
                wanted = other.generate(prompts, params, use_tqdm=False)
            except InvalidRequestError:  # words, lists and ends that may leave no token
                assume(False)
            found = mine.generate(prompts, params, use_tqdm=False)
            for a, b in zip(found, wanted, strict=True):
                assert a.outputs[0].token_ids == b.outputs[0].token_ids
                for mine_at, other_at in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
                    for token in set(mine_at) & set(other_at):
                        assert mine_at[token].logprob == pytest.approx(other_at[token].logprob, abs=1e-3)

        run()
        assert worker_of(mine)._runner._steps.compiled.met == 0
