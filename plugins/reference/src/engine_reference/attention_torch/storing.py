"""What becomes of values that the cache stores."""

from __future__ import annotations

import torch


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to the cache's dtype. What fp8 cannot hold becomes its largest number, and not a NaN."""
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        values = values.clamp(limits.min, limits.max)
    return values.to(dtype)
