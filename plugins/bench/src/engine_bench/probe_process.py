"""The probe itself: `python -m engine_bench.probe_process DTYPE` prints one JSON object.

A process of its own, so that it is the same whatever computes in the engine's worker, and so that neither this
package nor a worker without torch has torch imported. Its threads are Python's, each with torch on one thread: they
share no barrier, at which a loaded machine would stall.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from engine_bench.probe import Machine

LEAST_BYTES = 512 << 20
CACHES = 4
"""The buffer is at least this many times as large as all last-level caches together."""
SECONDS = 0.8
"""How long each of the two probes goes on."""
MATRIX = 1024
REPEATS_AT_LEAST = 3


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The sum of the largest caches of this machine, each counted once; 0 where the system does not say."""
    sizes: dict[str, int] = {}
    for index in root.glob("cpu[0-9]*/cache/index3"):
        try:
            text, shared = (index / "size").read_text().strip(), (index / "shared_cpu_list").read_text()
            sizes[shared] = int(text.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


def best_rate(work: Sequence[Callable[[], object]], amount: float) -> float:
    """Run each of `work` on a thread of its own, all at once, again and again; `amount` over the shortest time in
    which all were done."""
    shortest, repeats, began = float("inf"), 0, time.perf_counter()
    with ThreadPoolExecutor(len(work)) as threads:
        while repeats < REPEATS_AT_LEAST or time.perf_counter() - began < SECONDS:
            start = time.perf_counter()
            for future in [threads.submit(call) for call in work]:
                future.result()
            shortest = min(shortest, time.perf_counter() - start)
            repeats += 1
    return amount / shortest


def main() -> int:
    """Measure and print. Returns the exit code."""
    import torch

    name = sys.argv[1]
    dtype = getattr(torch, name)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(1)
    size = max(LEAST_BYTES, CACHES * last_level_cache_bytes())
    parts = [torch.ones(size // threads // 4) for _ in range(threads)]
    read = best_rate([part.sum for part in parts], sum(part.nbytes for part in parts))
    del parts
    pairs = [torch.randn(2, MATRIX, MATRIX).to(dtype) for _ in range(threads)]
    products = [partial(torch.mm, pair[0], pair[1], out=torch.empty_like(pair[0])) for pair in pairs]
    product = best_rate(products, threads * 2.0 * MATRIX**3)
    machine = Machine(read_gb_s=read / 1e9, gflop_s=product / 1e9, threads=threads, dtype=name)
    print(msgspec.json.encode(machine).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
