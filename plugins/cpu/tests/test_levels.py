"""What is said of levels that no processor was at hand for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")

from engine_cpu import levels
from engine_cpu.attention_cpu.card import CpuAttention
from engine_cpu.ops_cpu.card import CpuOps
from engine_cpu.quantization_int8.card import Int8Quantization


@pytest.mark.parametrize("card", [CpuOps, CpuAttention, Int8Quantization])
def test_cards_remark_that_a_level_was_not_run(monkeypatch: pytest.MonkeyPatch, card: Any) -> None:
    monkeypatch.setattr(levels, "why_not_built", list)
    for found, remarks in ((["scalar", "avx2"], 0), (["scalar", "neon"], 1), (["scalar", "neon", "neon_bf16"], 1)):
        module = SimpleNamespace(levels=lambda found=found: found)
        monkeypatch.setattr(levels, "importlib", SimpleNamespace(import_module=lambda name, module=module: module))
        said = card.remarks(SimpleNamespace(batch_invariant=False))
        assert len(said) == remarks and all(f"level {found[-1]} " in remark for remark in said)


def test_without_the_native_module_nothing_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "why_not_built", lambda: ["no"])
    assert CpuOps.remarks(None) == []  # type: ignore[arg-type]


def test_the_readme_lists_every_level() -> None:
    """And says of those that were not run that they were not."""
    text = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    rows = {
        row.split("`")[1]: row for row in text.split("## Levels")[1].split("## ")[0].splitlines() if row[:3] == "| `"
    }
    assert list(rows) == list(get_args(levels.Level))[1:]
    assert {level for level, row in rows.items() if "**not run**" in row} == set(levels.NOT_RUN)
