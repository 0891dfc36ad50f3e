"""How long the device works on a step: the time in which any of its kernels or copies runs, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals (start, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def busy_seconds(step: Callable[[], object], steps: int) -> float:
    """Of one of so many steps; 0 where the profiler says nothing of the device."""
    if not torch.cuda.is_available():
        for _ in range(steps):
            step()
        return 0.0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end) for e in profile.events() or () if e.device_type == cuda]
    return union(spans) / 1e6 / steps
