"""The host's GPUs, for cards of what runs on some of NVIDIA's alone. Without torch, and cheap: cards ask.

Asked of the driver's NVML, which starts nothing on a device and may be asked in any process. It knows all GPUs of the
machine, those that this process may not use included. Interface: NVIDIA's NVML API reference.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

LIBRARY = "libnvidia-ml.so.1"


@lru_cache(maxsize=1)
def capabilities() -> tuple[tuple[int, int], ...]:
    """The compute capability of each GPU, e.g. ((9, 0),); empty without a driver that answers."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = (_capability(nvml, place) for place in range(count.value))
        return tuple(one for one in found if one is not None)
    finally:
        nvml.nvmlShutdown()


def _capability(nvml: ctypes.CDLL, place: int) -> tuple[int, int] | None:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(place), ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    return major.value, minor.value
