"""The engine with the operations in Triton, as a user chooses them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from engine import LLM, SamplingParams
from engine_cuda.interpreter import interpreted

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4,
    "attention": "torch",
}  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=4, max_tokens=6, ignore_eos=True, presence_penalty=0.5),
]
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 7 + 9 * i).tolist()} for i in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="the GPU's own comparison is with transformers")
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_the_bundled_model_says_the_same(drafter: str | None) -> None:
    """Greedy and drawn tokens of several requests, with penalties, drafts and log probabilities, as by plain torch."""
    found = {}
    for ops in ("torch", "triton,torch"):
        with LLM(platform="host", ops=ops, **SETTINGS, **({} if drafter is None else {"drafter": drafter})) as llm:
            found[ops] = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    expected, ours = found["torch"], found["triton,torch"]
    assert [list(o.token_ids) for o in ours] == [list(o.token_ids) for o in expected]
    assert ours[0].cumulative_logprob == pytest.approx(expected[0].cumulative_logprob, abs=1e-3)
