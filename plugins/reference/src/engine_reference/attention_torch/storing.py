"""What becomes of keys and values that the cache stores."""

from __future__ import annotations

import math

import torch


def stored(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., P] and values [..., C] (of latent attention the rotated keys and the latents) as the cache holds them.

    They are rounded to the cache's dtype; what fp8 cannot hold becomes its largest number, and not a NaN. A vector of
    values that are not all finite is stored as zeros, and its key as NaN: a value that a query does not see is
    multiplied by 0, and 0 * NaN is NaN, but its score is overwritten. Who sees it still gets NaN, as it must.
    """
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        keys, values = (x.clamp(limits.min, limits.max) for x in (keys, values))
    else:
        keys, values = keys.to(dtype), values.to(dtype)
    # On the CPU one sum costs a tenth of looking at each element; elsewhere asking would wait for the device.
    if values.device.type != "cpu" or not math.isfinite(values.sum()):
        broken = ~values.isfinite().all(dim=-1, keepdim=True)
        keys, values = keys.masked_fill(broken, torch.nan), values.masked_fill(broken, 0)
    return keys.to(dtype), values.to(dtype)
