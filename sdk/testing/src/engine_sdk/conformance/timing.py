"""How long a piece of work takes: for figures in reports, never for assertions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(work: Callable[[], object], device: str = "cpu", budget: float = 0.1) -> float:
    """The median of as many runs as fit into `budget` seconds, after one that is not counted."""
    synchronize: Callable[[], object] = _nothing
    if device.partition(":")[0] == "cuda":
        import torch

        synchronize = torch.cuda.synchronize
    taken: list[float] = []
    total = 0.0  # kept, not summed up each time: there may be a hundred thousand runs
    work()
    while total < budget:
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        taken.append(time.perf_counter() - start)
        total += taken[-1]
    return statistics.median(taken)


def _nothing() -> None:
    """Work on the processor is done when the call returns."""
