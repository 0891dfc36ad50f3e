"""Several small arrays in one copy to the device: what a copy costs is being one, not its bytes."""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.platform import Platform

_WORD = 16
"""Bytes: each array begins at a multiple, which suits its own type and what kernels like to be told of pointers."""


def send(platform: Platform, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The arrays on the device, in new memory that they share: of equal shapes and of torch's dtypes of their names."""
    if len(arrays) == 1:
        host = torch.from_numpy(np.ascontiguousarray(arrays[0]))
        out = torch.empty(host.shape, dtype=host.dtype, device=platform.device)
        platform.to_device(host, out)
        return (out,)
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _WORD) * _WORD
    packed = np.zeros(total, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    out = torch.empty(total, dtype=torch.uint8, device=platform.device)
    platform.to_device(torch.from_numpy(packed), out)
    return tuple(
        out[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    )
