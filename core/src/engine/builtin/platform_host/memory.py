"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

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


def _reclaimable(folder: str) -> int:
    """Bytes that the container's use counts, but that only cache files and are given up when they are wanted."""
    for line in Path(folder, "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
