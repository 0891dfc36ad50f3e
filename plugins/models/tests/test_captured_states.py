"""Decode steps of models with states, recorded as native calls: the same tokens and log probabilities, bit by bit, as
steps that are launched as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from greedy import make
from model_table import WITH_STATES

from engine import LLM, SamplingParams

pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
CAPTURED = ("MambaForCausalLM", "Mamba2ForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "Zamba2ForCausalLM")
SETTINGS: dict[str, Any] = {
    "platform": "cpu", "ops": "cpu", "block_size": 8, "max_num_seqs": 5, "max_num_batched_tokens": 24,
    "num_kv_pages": 40,
}  # fmt: skip


def told(llm: LLM, seed: int) -> list[Any]:
    """What requests of any lengths are answered, some greedy, some drawn."""
    random = np.random.default_rng(seed)
    prompts = [{"prompt_token_ids": random.integers(3, 250, int(n)).tolist()} for n in random.integers(1, 50, 8)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=1, max_tokens=int(n), ignore_eos=True)
        for i, n in enumerate(random.integers(1, 20, 8))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (out.outputs[0].token_ids, [{t: e.logprob for t, e in place.items()} for place in out.outputs[0].logprobs])
        for out in outputs
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", CAPTURED)
def test_the_same_bits(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Batches that grow and shrink, prompts in chunks between them, prefixes found, requests preempted."""
    make(tmp_path, architecture, WITH_STATES[architecture])
    found = []
    for capture in ("never", "always"):
        with LLM(model=str(tmp_path), dtype=dtype, **SETTINGS, **{"platform.capture": capture}) as llm:
            worker = llm.llm_engine.client.worker
            assert worker.not_captured == (), worker.not_captured
            assert worker.captured == ((5,) if capture == "always" else ())
            found.append([told(llm, seed) for seed in (1, 2, 1)])
    assert found[0] == found[1]
