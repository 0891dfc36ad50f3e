"""A KV cache of 8 bits in the whole engine: what it costs in perplexity, and that nothing else loses the scales."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.types.outputs import StepStats

pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")
pytest.importorskip("engine_tiny", reason="engine-tiny is not installed")

from engine_tiny import model_folder
from engine_tiny.corpus import chat
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import load_tokenizer

CODES = ("int8", "fp8")
MOST = 0.005
"""By which share perplexity may grow."""


def perplexity(documents: list[tuple[list[int], np.ndarray]], **settings: Any) -> float:
    """Of what the assistant says in conversations, a token; every key and value is read from the cache."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids, _ in documents]
    losses = []
    with LLM(num_kv_pages=400, enable_prefix_caching=False, **settings) as llm:
        for output, (ids, targets) in zip(llm.generate(prompts, params, use_tqdm=False), documents, strict=True):
            entries = list(output.prompt_logprobs)[1:]
            losses += [-entry[i].logprob for i, entry, own in zip(ids[1:], entries, targets[1:], strict=True) if own]
    return math.exp(float(np.mean(losses)))


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_perplexity(native: Any, count: int) -> None:
    """Of held-out texts, with the bundled model: within half a percent of what it is with keys and values unrounded."""
    encoder = Encoder(load_tokenizer(model_folder()))
    documents = [encoder.document(one) for one in itertools.islice(chat.documents(99, "held_out"), count)]
    documents = [(ids[:1000], np.asarray(targets[:1000])) for ids, targets in documents]
    whole = perplexity(documents, dtype="float32")
    assert 1 < whole < 2  # the model knows such texts
    for codes in CODES:
        found = perplexity(documents, dtype="float32", kv_cache_dtype=codes)
        assert found != whole and abs(found / whole - 1) < MOST, codes


@pytest.mark.parametrize("codes", CODES)
def test_pages_keep_their_scales(native: Any, codes: str) -> None:
    """The same tokens where pages are swapped out and in, shared and copied, or written by drafts that were wrong."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": codes, "max_num_seqs": 4, "block_size": 8}
    shared = np.random.default_rng(2).integers(0, 256, 45).tolist()
    prompts = [{"prompt_token_ids": [*shared[:cut], 7 * cut]} for cut in (45, 43, 29, 12)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def tokens(**more: Any) -> tuple[list[list[int]], StepStats]:
        with LLM(**settings, **more) as llm:
            found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)][-1]
            return [list(output.outputs[0].token_ids) for output in found], llm.llm_engine.stats()

    expected, _ = tokens(num_kv_pages=200, enable_prefix_caching=False)
    found, stats = tokens(num_kv_pages=200)
    assert found == expected and stats.prefix_hits > 0
    found, stats = tokens(num_kv_pages=24, swap_space="4MiB", preemption_mode="swap")
    assert found == expected and stats.num_swap_preemptions == stats.num_preemptions > 0
    found, stats = tokens(num_kv_pages=200, drafter="ngram", **{"drafter.adaptive": False})  # by no clock
    assert found == expected and stats.num_drafts > stats.num_accepted_drafts


@pytest.mark.slow
def test_two_ranks_keep_scales_of_their_own_heads(native: Any) -> None:
    """In float64, by the reference attention: rounding of sums would else be another."""
    settings = {"dtype": "float64", "kv_cache_dtype": "int8", "num_kv_pages": 60}
    prompts = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 30).tolist()} for i in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens(**more: Any) -> list[list[int]]:
        with LLM(**settings, **more) as llm:
            return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    assert tokens(tensor_parallel_size=2) == tokens()
