"""What of `tests.gpu.bench_mixed` needs no GPU."""

from __future__ import annotations

import pytest

from engine import EngineConfig
from engine_bench.session import open_session
from tests.gpu import bench_mixed


def test_what_arrivals_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is computed and generates; the rows that decode beside them go on to the end."""
    for name, value in {"DECODES": 3, "STEADY": 4, "WARM": 1, "ARRIVALS": 4, "SHORTEST": 8, "LONGEST": 24}.items():
        monkeypatch.setattr(bench_mixed, name, value)
    config = EngineConfig(model="dummy:tiny", max_num_seqs=6, max_model_len=512, num_kv_pages=160, seed=0)
    with open_session(config) as session:
        row = bench_mixed.measure(session, "tiny")
        assert not session.engine.has_unfinished_requests()
    figures = row.figures
    assert "tokens/s" in row.result and set(figures) >= {"tokens_s", "added_p50_ms", "added_p99_ms", "first_p50_ms"}
    assert figures["added_p99_ms"] >= figures["added_p50_ms"] and figures["gap_p99_ms"] > 0
    assert figures["tokens_s"] > 0 and figures["first_p50_ms"] > 0
