"""The engine with attention `triton`, as a user chooses it: its kernels interpreted where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("engine_tiny", reason="engine-tiny is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine import LLM, SamplingParams
from engine.types.errors import UnfitDriverError
from engine_cuda.interpreter import interpreted

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
TEXTS = ["Once upon a time", "one two three one two three one two"]


def tokens(**settings: Any) -> list[list[int]]:
    with LLM(**SETTINGS | settings) as llm:
        outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"drafter": "ngram"}, {"kv_cache_dtype": "fp8"}], ids=["plain", "drafts", "fp8"])
def test_greedy_tokens_are_the_reference_drivers(how: dict[str, Any]) -> None:
    """Prompts in chunks beside decodes, in blocks of four tokens; also with drafts, and with a cache of fp8."""
    if not interpreted():
        pytest.skip("on a GPU, attention is compared with transformers'")
    assert tokens(dtype="float32", attention="triton", **how) == tokens(dtype="float32", attention="torch", **how)


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(UnfitDriverError, match="'triton'.*dtype float64 is not one of bfloat16, float16, float32"):
        LLM(dtype="float64", attention="triton")
