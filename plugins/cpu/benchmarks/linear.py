"""The linear layer beside the reference driver's: `python plugins/cpu/benchmarks/linear.py`.

Weights of more than the caches hold are gone through in turn by both drivers (A B A B). Printed are gigabytes of
weights a second, the median of five turns, and the median of the pairs' ratios. Processor time counts with one thread,
so that other work on the machine does not; with several, time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace

import torch

from engine.plugin import Registry
from engine.plugin.loading import load_body

OUTPUTS, INPUTS = 6144, 1024
"""Gate and up of a model of 0.6 billion parameters."""
BYTES = 160 << 20
ROWS = (1, 2, 4, 8, 16, 32, 64)
TURNS = 5


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--level", default="auto")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    registry = Registry.discover()
    drivers = []
    for name in ("cpu", "torch"):
        candidate = registry.find("ops", name)
        card = registry.card(candidate)
        options = card.Options(level=asked.level) if card.Options is not None else None
        drivers.append(load_body(card, candidate=candidate)(SimpleNamespace(options=options)))
    for dtype in (torch.bfloat16, torch.float32):
        count = BYTES // (OUTPUTS * INPUTS * dtype.itemsize)
        weights = [(torch.randn(OUTPUTS, INPUTS) / 32).to(dtype) for _ in range(count)]
        packed = [[driver.pack_linear(weight.clone(), None) for weight in weights] for driver in drivers]
        gigabytes = count * OUTPUTS * INPUTS * dtype.itemsize / 1e9
        for rows in ROWS:
            x, rates = torch.randn(rows, INPUTS).to(dtype), ([], [])
            for _ in range(TURNS):
                for driver, layers, found in zip(drivers, packed, rates, strict=True):
                    start = clock()
                    for layer in layers:
                        driver.linear(x, layer)
                    found.append(gigabytes / (clock() - start))
            ours, theirs = map(statistics.median, rates)
            ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
            print(f"{dtype!s:15} {rows:3} rows   cpu {ours:5.1f} GB/s   torch {theirs:5.1f} GB/s   ratio {ratio:.2f}")
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
