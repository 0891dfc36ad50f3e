"""Constrained requests over several ranks: the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from thread_ranks import registry

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.config.settings import EngineConfig
from engine.llm import LLMEngine

TEXTS = ["a rather long text to write", "a rather short one", "bcd", "0123456789" * 2]
SETTINGS = {
    "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 40, "block_size": 4,
    "grammar": "choice",
}  # fmt: skip


def requests() -> list[tuple[str, SamplingParams]]:
    """Six, every second under a constraint."""
    found = []
    for index in range(6):
        prompt = " ".join(map(str, range(3 * index))) + "?"  # no half characters at its end
        params = SamplingParams(
            max_tokens=16, temperature=(0.0, 0.9, 1.2)[index % 3], seed=index, logprobs=1, ignore_eos=index % 4 == 1,
            structured_outputs=StructuredOutputsParams(choice=TEXTS) if index % 2 else None,
        )  # fmt: skip
        found.append((prompt, params))
    return found


def generate(folder: Path, size: int, **settings: Any) -> list[tuple[str, list[int]]]:
    fields = {"model": str(folder), "tensor_parallel_size": size, **SETTINGS, **settings}
    engine = LLMEngine.from_engine_args(EngineConfig(**fields), registry())
    try:
        for index, (prompt, params) in enumerate(requests()):
            engine.add_request(str(index), prompt, params)
        found: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            found.update({output.request_id: output.outputs[0] for output in engine.step()})
        if "executor" in settings:
            assert engine.client.core.executor.overlaps > 5  # type: ignore[attr-defined]
        return [(found[str(i)].text, list(found[str(i)].token_ids)) for i in range(6)]
    finally:
        engine.shutdown()


def check(texts: list[str]) -> None:
    assert all(any(choice.startswith(text) for choice in TEXTS) for text in texts[1::2])
    assert any(text in TEXTS for text in texts[1::2])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_draw_under_the_same_masks(checkpoints, size: int) -> None:
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    expected = generate(folder, 1)
    check([text for text, _ in expected])
    assert generate(folder, size, executor="threads") == expected


def test_ranks_that_are_processes(checkpoints) -> None:
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    prompts, params = zip(*requests(), strict=True)
    with LLM(str(folder), tensor_parallel_size=2, **SETTINGS) as llm:
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    found = [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]
    assert found == generate(folder, 1)
