"""`--batch-invariant`: the log probabilities of a request have the same bits alone and in any crowd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.types.errors import PluginError

PROMPTS = [[(7 * i + j * (i + 3)) % 250 + 3 for j in range(5 + 11 * i)] for i in range(7)]
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=2) for i in range(7)
]

Bits = list[tuple[int, tuple[float, ...]]]


def bits(output: Any) -> Bits:
    """Each token, with the log probabilities at its place."""
    completion = output.outputs[0]
    return [
        (token, tuple(entry.logprob for entry in at.values()))
        for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


@pytest.fixture(scope="module")
def alone() -> list[Bits]:
    with LLM("tiny", dtype="bfloat16", batch_invariant=True, max_num_seqs=1, num_kv_pages=400) as llm:
        return [
            bits(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0])
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 5},
        {"num_kv_pages": 12, "max_num_seqs": 4},
        {"drafter": "ngram"},
        {"pipeline_parallel_size": 3, "communicator": "gloo"},  # which adds up three ranks in another order, but sends
        {"tensor_parallel_size": 2, "batch_invariant": True},
    ],
    ids=lambda settings: ",".join(settings) or "a crowd",
)
def test_the_same_bits(alone: list[Bits], settings: dict[str, Any], several_threads: None) -> None:
    with LLM("tiny", dtype="bfloat16", **{"batch_invariant": True, "num_kv_pages": 400, **settings}) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [bits(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        if "tensor_parallel_size" in settings:  # other sums than one rank's, but the same in each batch
            alone = [bits(llm.generate(p, q, use_tqdm=False)[0]) for p, q in zip(prompts, PARAMS, strict=True)]
    assert found == alone


def test_who_cannot_is_refused_with_the_reason() -> None:
    with pytest.raises(PluginError, match="its card does not say batch_invariant"):
        LLM("tiny", batch_invariant=True, attention="torch")
