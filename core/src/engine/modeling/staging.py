"""Memory for weights on their way from the checkpoint to the driver that packs them."""

from __future__ import annotations

import math
import mmap

import torch

LARGE_BYTES = 256 << 10
"""Less than that is the heap's affair."""


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose memory goes back to the system as soon as nobody has the tensor any more.

    On a CPU a large one gets a mapping of its own. In the heap, what comes and goes while a model is loaded would lie
    between what stays: a process would keep the memory of its plain weights although it holds packed ones alone.
    """
    size = math.prod(shape) * dtype.itemsize
    on_host = torch.empty(0, device=device).is_cpu
    if not on_host or size < LARGE_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)
