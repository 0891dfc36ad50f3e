"""How long the device works on a step, and on what: by torch's profiler."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

MOST_KERNELS = 40
"""Lines of a table."""


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals (start, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def busy_seconds(step: Callable[[], object], steps: int, title: str = "") -> float:
    """In which any kernel or copy of one of so many steps runs; 0 where the profiler says nothing of the device.

    With a title, and a folder in the environment's OUT, what ran is written into its kernels.md.
    """
    if not torch.cuda.is_available():
        for _ in range(steps):
            step()
        return 0.0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    cuda = torch._C._autograd.DeviceType.CUDA
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profile.events() or () if e.device_type == cuda]
    busy = union((start, end) for _, start, end in events) / 1e6 / steps
    if title and (out := os.environ.get("OUT")):
        with (Path(out) / "kernels.md").open("a") as file:
            file.write(table(title, events, steps, busy))
    return busy


def table(title: str, events: Iterable[tuple[str, float, float]], steps: int, busy: float) -> str:
    """Of what ran on the device: events are (name, start, end) in microseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, start, end in events:
        times[name].append(end - start)
    rows = sorted(times.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
    lines = [f"### {title}: {busy * 1e6:,.0f} us a step in which the device works", ""]
    lines += ["| us a step | launches a step | us each | |", "|---|---|---|---|"]
    for name, each in rows:
        plain = name.replace("|", "/")[:100]
        lines.append(f"| {sum(each) / steps:,.1f} | {len(each) / steps:.1f} | {sum(each) / len(each):.2f} | {plain} |")
    return "\n".join([*lines, "", ""])
