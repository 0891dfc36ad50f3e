"""In what precision the reference computes."""

from __future__ import annotations

import torch


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()
