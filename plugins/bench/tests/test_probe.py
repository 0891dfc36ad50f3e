"""The probe's process, and what two probes say of a run."""

from __future__ import annotations

import pytest

from engine.types.errors import EngineError
from engine_bench import probe_process
from engine_bench.probe import Machine, probe, probe_figures, warnings


def machine(read: float, product: float) -> Machine:
    return Machine(read_gb_s=read, gflop_s=product, threads=4, dtype="float32")


@pytest.mark.slow  # `bench latency` probes too
def test_a_probe_in_its_own_process():
    found = probe("float32")
    assert found.read_gb_s > 0 and found.gflop_s > 0 and found.threads >= 1 and found.dtype == "float32"


def test_a_probe_that_fails_says_why():
    with pytest.raises(EngineError, match="no_such_dtype"):
        probe("no_such_dtype")


def test_probes_that_lie_apart_are_told():
    assert warnings(machine(10, 100), machine(8.1, 100)) == []
    (line,) = warnings(machine(10, 100), machine(7.9, 100))
    assert "10.0 GB/s before and 7.9 GB/s after" in line
    assert len(warnings(machine(7, 70), machine(10, 100))) == 2
    assert probe_figures(machine(10, 100), machine(10, 50))["noisy"] is True
    assert probe_figures(machine(10, 100), machine(10, 99))["noisy"] is False


def test_caches_are_counted_once(tmp_path):
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("32768K\n")
        (folder / "shared_cpu_list").write_text(shared)
    assert probe_process.last_level_cache_bytes(tmp_path) == 64 << 20
    assert probe_process.last_level_cache_bytes(tmp_path / "none") == 0


def test_the_rate_counts_all_threads_and_errors_come_out():
    calls: list[int] = []
    rate = probe_process.best_rate([lambda i=i: calls.append(i) for i in range(3)], amount=6.0)
    assert rate > 0 and calls.count(0) == calls.count(1) == calls.count(2) >= probe_process.REPEATS_AT_LEAST
    with pytest.raises(ZeroDivisionError):
        probe_process.best_rate([lambda: 1 / 0], amount=1.0)
