"""What several families of operations ask: the dtype to compute in, and whether a value may be asked for."""

from __future__ import annotations

import torch


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def may_ask(tensor: torch.Tensor) -> bool:
    """True where the host has a tensor's values already. Elsewhere `bool(tensor)`, `nonzero` and the like would wait
    for everything that was launched on the device."""
    return tensor.is_cpu
