"""One engine core's start message for each of several."""

from __future__ import annotations

import os

from msgspec.structs import replace

from engine.types.start import CoreStart


def rank_starts(start: CoreStart, size: int) -> list[CoreStart]:
    """The start messages of `size` engine cores on this machine: they share its processor's cores evenly.

    What the user set (KV cache, batch size) is each core's own; what the platform measures is divided by the platform,
    which knows whether ranks share it.
    """
    if size == 1:
        return [start]
    worker = start.worker
    threads = max(1, _cores() // size)
    if worker.num_threads is not None:
        threads = min(threads, worker.num_threads)
    return [
        replace(start, worker=replace(worker, data_parallel_rank=rank, data_parallel_size=size, num_threads=threads))
        for rank in range(size)
    ]


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
