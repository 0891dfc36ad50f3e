"""`python -m tests.benchmarks start`: how long a start takes, and what a server at rest holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.types.errors import EngineError
from engine_bench.report import Report
from engine_bench.server_process import own_server
from engine_bench.statistics import percentile

PROMPT = "Once upon a time"
QUANTILES = (0, 50, 100)
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """What to measure.

    Args:
        repeats: runs of `engine generate`, after one that is not counted: it fills the system's caches.
        output_len: tokens of each.
    """

    repeats: int
    output_len: int


def measure_start(options: StartOptions, flags: Sequence[str]) -> Report:
    """Time from the start of `engine generate` to its first text and to its end; the memory of `engine serve`.

    Raises:
        EngineError: one of them failed; what it printed is told.
    """
    runs = [_generate(options.output_len, flags) for _ in range(options.repeats + 1)][1:]
    report = Report(f"start: {options.repeats} runs of `engine generate`, and a server", {"repeats": options.repeats})
    for name, label, values in (
        ("first_text_s", "first text (s)", [first for first, _ in runs]),
        ("end_s", "end of the command (s)", [end for _, end in runs]),
    ):
        report.figures |= {f"{name}_p{q}": percentile(values, q) for q in QUANTILES}
        report.quantiles(label, name, QUANTILES)
    with own_server(flags) as server:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        held = {name: sum(_memory(process.pid, name) for process in processes) for name in ("Rss", "Pss")}
    report.figures |= {
        "processes": len(processes),
        "rss_mib": held["Rss"] / _MIB,
        "pss_mib": held["Pss"] / _MIB,
    }
    report.row(
        "the server's memory",
        f"{len(processes)} processes",
        f"Rss {held['Rss'] / _MIB:.0f} MiB",
        f"Pss {held['Pss'] / _MIB:.0f} MiB",
    )
    return report


def _generate(output_len: int, flags: Sequence[str]) -> tuple[float, float]:
    """Seconds to the first text of the command, and to its end."""
    line = [sys.executable, "-m", "engine", "generate", PROMPT, f"--max-tokens={output_len}", "--ignore-eos", *flags]
    began = time.perf_counter()
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1 << 16)
        first = time.perf_counter() - began
        _, errors = process.communicate()
    if process.returncode or not text:
        raise EngineError("measure a start", f"`engine generate` ended so:\n{errors.decode(errors='replace').strip()}")
    return first, time.perf_counter() - began


def _memory(pid: int, name: str) -> int:
    """Bytes that the system counts for a process: "Rss", or "Pss", where shared pages are divided by their sharers."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise EngineError("measure a server's memory", f"/proc/{pid}/smaps_rollup does not tell {name}")
