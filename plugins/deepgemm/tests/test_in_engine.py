"""Checkpoints of DeepSeek's form through the engine, by the double of the library: from the files to tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deep_gemm_double
import pytest
from by_library import hold_engine
from checkpoints import Checkpoints
from test_engine import LATENT, MOE, SIZES, with_default_head, write
from written import CASES

from engine_deepgemm import card
from engine_deepgemm.installed import Facts

NEAR = 0.15
"""Of log probabilities, where another kernel than the oracle's computes what stands between experts' projections."""


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
    experts = "Moe" in architecture
    near = NEAR if experts else 0.0
    hold_engine(stored, monkeypatch, card.DeepGemm, "oracle_body:OracleBody", 3, near)
    assert {kind for kind, _ in deep_gemm_double.calls} == ({"dense", "grouped"} if experts else {"dense"})
