"""Every model that pools through the whole engine beside transformers: one row of the table each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy import saved
from model_table import ENCODERS, POOLED

from engine import LLM, PoolingParams

ALL = {name: config for name, config in {**POOLED, **ENCODERS}.items() if hasattr(transformers, name)}
LENGTHS = (23, 1, 60, 5, 33, 16, 40)
"""Of prompts: many times the windows, and more together than a step has room for."""


def agrees(architecture: str, folder: Path, **settings: Any) -> None:
    """Labels of a classifier, of the prompt or of each of its tokens; else each token's hidden state."""
    model = saved(folder, architecture, ALL[architecture])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 256, (1, n), generator=generator) for n in LENGTHS]
    labels = "Classification" in architecture
    asked = PoolingParams(use_activation=False) if labels else PoolingParams(task="token_embed", normalize=False)
    with LLM(str(folder), dtype="float32", max_num_seqs=4, max_num_batched_tokens=80, **settings) as llm:
        found = llm.encode([{"prompt_token_ids": ids[0].tolist()} for ids in prompts], asked, use_tqdm=False)
    for ids, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            given = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        expected = (given.logits if labels else given.last_hidden_state)[0]
        torch.testing.assert_close(torch.tensor(output.outputs.data), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ALL)
def test_as_transformers_computes_it(architecture: str, tmp_path: Path) -> None:
    """Several prompts in a step."""
    agrees(architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ALL)
def test_on_two_ranks(architecture: str, tmp_path: Path) -> None:
    """Layers divided over ranks."""
    agrees(architecture, tmp_path, tensor_parallel_size=2)
