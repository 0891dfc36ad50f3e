"""Checkpoints of each method through the engine, by the double of the library: from the files to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import humming_double
import pytest
from by_library import hold_engine
from checkpoints import Checkpoints
from test_engine import GPT_OSS, MOE, SIZES, with_default_head, write
from written import CASES

from engine_humming import card
from engine_humming.installed import Facts

NEAR = 0.15
"""Of log probabilities: experts' projections are rounded to bfloat16 in another order than one by one."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("architecture", "name", "sizes"),
    [
        ("LlamaForCausalLM", "awq", SIZES),
        pytest.param("LlamaForCausalLM", "gptq ordered", SIZES, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", "fp8 channel", SIZES, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "w4a16 asymmetric", MOE, marks=pytest.mark.slow),
        pytest.param("GptOssForCausalLM", "mxfp4", GPT_OSS, marks=pytest.mark.slow),
    ],
)
def test_from_files_to_tokens(
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    name: str,
    sizes: dict[str, Any],
) -> None:
    """Nobody names the driver, and it says what the published formulas say."""
    stored, _ = write(checkpoints(architecture, **sizes), tmp_path, with_default_head(CASES[name]))
    monkeypatch.setattr(card, "facts", lambda: Facts("0.1.20"))
    humming_double.install(monkeypatch)
    experts = architecture != "LlamaForCausalLM"
    near = NEAR if experts else 0.0
    hold_engine(stored, monkeypatch, card.Humming, "humming_oracle:OracleBody", 5, near)
    kinds = {kind for _, kind, _ in humming_double.calls}
    assert "grouped_contiguous" in kinds if experts else kinds == {"dense"}
