"""Sampling beside the reference driver's: `python plugins/cpu/benchmarks/sampling.py`.

Logits of a made-up distribution (a few likely tokens, the others far behind) are drawn from by both drivers in turn
(A B A B). Printed are microseconds of a call, the medians of five turns of several calls. With one thread processor
time counts, so that other work on the machine does not; with several, time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from engine.interfaces.ops import SamplingRows
from engine.plugin import Registry
from engine.plugin.loading import load_body

TURNS = 5
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_k 40": (0.8, 40, 1.0, 0.0),
    "top_p 0.95": (0.8, 0, 0.95, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
    "all of them": (0.8, 40, 0.95, 0.05),
}


def rows_of(count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingRows:
    """The same settings for every row."""
    return SamplingRows(
        torch.full((count,), temperature), torch.full((count,), top_k, dtype=torch.int32), torch.full((count,), top_p),
        torch.full((count,), min_p), torch.arange(count), torch.arange(count),
    )  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default="auto")
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    registry = Registry.discover()
    drivers: list[Any] = []
    for name in ("cpu", "torch"):
        candidate = registry.find("ops", name)
        card = registry.card(candidate)
        options = card.Options(level=asked.level) if card.Options is not None else None
        drivers.append(load_body(card, candidate=candidate)(SimpleNamespace(options=options)))
    for vocab in asked.vocab:
        for count in asked.rows:
            logits = torch.randn(count, vocab) * 2
            logits[:, :50] += torch.linspace(12, 4, 50)
            for title, settings in SETTINGS.items():
                rows, times = rows_of(count, *settings), ([], [])
                calls = max(1, 2_000_000 // (vocab * count))
                for _ in range(TURNS):
                    for driver, found in zip(drivers, times, strict=True):
                        start = clock()
                        for _ in range(calls):
                            driver.sample(logits, rows)
                        found.append((clock() - start) / calls * 1e6)
                ours, theirs = map(statistics.median, times)
                print(
                    f"{count:3} x {vocab:,} {title:12} cpu {ours:8.0f} us   torch {theirs:8.0f} us   "
                    f"ratio {theirs / ours:.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
