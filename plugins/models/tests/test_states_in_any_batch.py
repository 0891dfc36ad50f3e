"""What a request is answered by models with states does not depend, bit by bit, on the requests beside it, on where its
prompt was cut, on prefixes that were found, on preemptions, nor, without attention, on drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from greedy import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_table import WITH_STATES

from engine import LLM, SamplingParams

pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
SETTINGS: dict[str, Any] = {"ops": "cpu", "block_size": 8, "batch_invariant": True, "dtype": "float32"}
BUSY = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_kv_pages": 40}
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "num_kv_pages": 60, "enable_prefix_caching": False}
Request = tuple[int, int, int]
"""Tokens of the beginning that all share, of a prompt's own, and of the answer."""
requests = st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 12))


def told(llm: LLM, asked: list[Request], seed: int, repeated: bool) -> list[Any]:
    """Tokens and log probabilities."""
    random = np.random.default_rng(seed)
    high = 6 if repeated else 250
    shared = random.integers(3, high, 30)
    prompts = [
        {"prompt_token_ids": [*shared[:n].tolist(), *np.random.default_rng([seed, i]).integers(3, high, own).tolist()]}
        for i, (n, own, _) in enumerate(asked)
    ]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, logprobs=1, max_tokens=count, ignore_eos=True)
        for i, (_, _, count) in enumerate(asked)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (out.outputs[0].token_ids, [{t: e.logprob for t, e in place.items()} for place in out.outputs[0].logprobs])
        for out in outputs
    ]


@pytest.mark.parametrize(
    ("architecture", "drafts"),
    [
        ("Mamba2ForCausalLM", {}),
        ("BambaForCausalLM", {}),
        pytest.param("MambaForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param("Mamba2ForCausalLM", {"drafter": "ngram", "drafter.min_match": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_schedule(architecture: str, drafts: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path, architecture, WITH_STATES[architecture])
    alone = LLM(model=str(tmp_path), **SETTINGS, **ALONE)
    busy = LLM(model=str(tmp_path), **SETTINGS, **BUSY, **drafts)

    @given(asked=st.lists(requests, min_size=1, max_size=9), seed=st.integers(0, 50))
    @settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def any_of(asked: list[Request], seed: int) -> None:
        found = told(busy, asked, seed, bool(drafts))
        assert found == told(alone, asked, seed, bool(drafts))

    try:
        any_of()
    finally:
        alone.shutdown()
        busy.shutdown()
