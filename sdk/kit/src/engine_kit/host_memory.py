"""The host's memory, for platforms whose device is the processor: how much there is, how much this process has and may
still take, how much a call takes at its peak, and the KV pool in it. Without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from engine.interfaces.platform import CacheMemory
from engine.types.errors import KVCacheTooSmallError

MAX_DEFAULT_POOL = 4 << 30
"""The KV pool's bytes where the user names no number, unless a quarter of the free memory is less."""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""What to write there, so that the peak of resident memory begins anew (Linux, proc(5))."""

_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and use as containers see them, versions 2 and 1."""


def cache_memory(largest_step: Callable[[], None], utilization: float | None, ranks: int) -> CacheMemory:
    """See `engine.interfaces.platform.Platform.kv_cache_memory`.

    By default the smaller of 4 GiB and a quarter of what a largest step leaves free, divided by all ranks that share
    the memory: the machine has other work. With `utilization`, what weights and steps leave of that share of all
    memory, at most what is free.
    """
    step_bytes = peak_growth(largest_step)
    left = free_memory() // ranks - step_bytes
    if utilization is None:
        return CacheMemory(min(MAX_DEFAULT_POOL // ranks, left // 4), step_bytes)
    budget = int(total_memory() * utilization) // ranks - resident_memory() - step_bytes
    return CacheMemory(min(budget, left), step_bytes)


def zeroed_pool(num_pages: int, page_bytes: int) -> np.ndarray:
    """uint8 [num_pages, page_bytes]. Raises KVCacheTooSmallError."""
    # Asked first: Linux hands out zeroed memory that it does not have, and ends the process when it is used.
    free = free_memory()
    if num_pages * page_bytes > free:
        raise _no_memory(num_pages, page_bytes, f"{free:,} bytes of memory are free")
    try:
        # numpy's zeros are the system's own: a page of memory is cleared when it is first touched, not now.
        return np.zeros((num_pages, page_bytes), np.uint8)
    except (ValueError, MemoryError) as error:
        raise _no_memory(num_pages, page_bytes, str(error).partition("\n")[0]) from error


def _no_memory(num_pages: int, page_bytes: int, found: str) -> KVCacheTooSmallError:
    return KVCacheTooSmallError(
        f"allocate a KV cache of {num_pages:,} pages of {page_bytes:,} bytes ({num_pages * page_bytes:,} bytes)",
        found,
        "lower --kv-cache-memory or --num-kv-pages",
    )


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

    Memory that the process had freed and not given back to the system would be used again without growth: it is
    given back first, where the C library lets itself be told (GNU's does); elsewhere the answer may be a little low.
    Where the system keeps no peak that can begin anew (Linux does), the growth that is left when the call has ended
    stands for it, which is lower.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
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
