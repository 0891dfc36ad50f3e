"""Whether a value may be asked for."""

from __future__ import annotations

import torch


def may_ask(tensor: torch.Tensor) -> bool:
    """True where the host has a tensor's values already. Elsewhere `bool(tensor)`, `nonzero` and the like would wait
    for everything that was launched on the device."""
    return tensor.is_cpu
