"""Which GPUs can change each other's memory, as the CUDA driver says it: for cards, without torch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import combinations
from typing import Any

_ACCESS, _ATOMICS = 2, 3
"""CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED. NVLink has the latter, PCIe has not."""


def not_linked(count: int, library: Any = None) -> list[str]:
    """Why the GPUs that this process sees are not all linked with each other; of several ranks on one GPU nothing.

    count: how many are used; the first ones, or all where there are fewer.
    library: the CUDA driver's; None opens it.
    """
    if library is None:
        return list(_asked(count))
    if library.cuInit(ctypes.c_uint(0)):
        return ["the CUDA driver cannot be started, so nothing is known of links between GPUs"]
    visible = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(visible))
    for pair in combinations(range(min(count, visible.value)), 2):
        for first, second in (pair, pair[::-1]):
            if not _has(library, _ACCESS, first, second):
                return [f"GPU {first} cannot see the memory of GPU {second}"]
            if not _has(library, _ATOMICS, first, second):
                return [f"GPUs {first} and {second} are not linked by NVLink, without which NCCL is as fast"]
    return []


@lru_cache(maxsize=8)
def _asked(count: int) -> tuple[str, ...]:
    try:
        return tuple(not_linked(count, ctypes.CDLL("libcuda.so.1")))
    except OSError:
        return ("the CUDA driver's library is not found",)


def _has(library: Any, attribute: int, first: int, second: int) -> bool:
    devices, value = [ctypes.c_int(), ctypes.c_int()], ctypes.c_int()
    for device, place in zip(devices, (first, second), strict=True):
        if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(place)):
            return False
    return not library.cuDeviceGetP2PAttribute(ctypes.byref(value), ctypes.c_int(attribute), *devices) and bool(
        value.value
    )
