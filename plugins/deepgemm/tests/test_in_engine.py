"""Checkpoints of DeepSeek's form through the engine, by the double of the library: from the files to tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deep_gemm_double
import numpy as np
import pytest
from checkpoints import Checkpoints
from test_engine import LATENT, MOE, SETTINGS, SIZES, scores, tokens, with_default_head, write
from written import CASES

from engine import LLM, SamplingParams
from engine_deepgemm import card
from engine_deepgemm.installed import Facts

NEAR = 0.15
"""Of log probabilities, where another kernel than the oracle's computes what stands between experts' projections."""


def answers(folder: Path) -> list[Any]:
    """Of a prompt of several steps; kernels are interpreted, so there are few."""
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    with LLM(model=folder, dtype="bfloat16", **SETTINGS) as llm:
        return llm.generate(["Once upon a time"], greedy, use_tqdm=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("LlamaForCausalLM", SIZES),
        pytest.param("Qwen3MoeForCausalLM", MOE, marks=pytest.mark.slow),
        pytest.param("DeepseekV3ForCausalLM", LATENT, marks=pytest.mark.slow),
    ],
)
def test_from_files_to_tokens(
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    sizes: dict[str, Any],
) -> None:
    """Nobody names the driver, and it says what the published formulas say."""
    stored, _ = write(checkpoints(architecture, **sizes), tmp_path, with_default_head(CASES["deepseek"]))
    monkeypatch.setattr(card, "facts", lambda: Facts("0.2.5"))
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_double)
    deep_gemm_double.calls.clear()
    found = answers(stored)
    experts = "Moe" in architecture
    assert {kind for kind, _ in deep_gemm_double.calls} == ({"dense", "grouped"} if experts else {"dense"})
    monkeypatch.setattr(card.DeepGemm, "body", "oracle_body:OracleBody")
    expected = answers(stored)
    assert tokens(found) == tokens(expected)
    assert np.abs(scores(found) - scores(expected)).mean() <= (NEAR if experts else 0.0)
