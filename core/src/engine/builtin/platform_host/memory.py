"""How much memory there is, how much this process has and may still take, and how much a call takes at its peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""What to write there, so that the peak of resident memory begins anew (Linux, proc(5))."""

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and use as containers see them, versions 2 and 1."""


def free_memory() -> int:
    """Bytes that can be had without swapping: the machine's, or the container's where that is less."""
    free = int(psutil.virtual_memory().available)
    for folder, limit, used in _CGROUPS:
        try:
            room = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text()) + _reclaimable(folder)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        free = min(free, max(room, 0))
    return free


def total_memory() -> int:
    """Bytes of the machine, or of the container where that is less."""
    total = int(psutil.virtual_memory().total)
    for folder, limit, _ in _CGROUPS:
        try:
            total = min(total, int(Path(folder, limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


def resident_memory() -> int:
    """Bytes that this process has."""
    return int(psutil.Process().memory_info().rss)


def peak_growth(call: Callable[[], None]) -> int:
    """Bytes by which the process's resident memory grows at its peak while the call runs.

    Memory that the process had freed and not given back to the system is used again without growth, so the answer may
    be a little low. Where the system keeps no peak that can begin anew (Linux does), the growth that is left when the
    call has ended stands for it, which is lower.
    """
    before = resident_memory()
    try:
        _CLEAR_REFS.write_text(_FORGET_PEAK)
    except OSError:
        call()
        return max(0, resident_memory() - before)
    call()
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return max(0, int(line.split()[1]) * 1024 - before)
    return max(0, resident_memory() - before)


def _reclaimable(folder: str) -> int:
    """Bytes that the container's use counts, but that only cache files and are given up when they are wanted."""
    for line in Path(folder, "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
