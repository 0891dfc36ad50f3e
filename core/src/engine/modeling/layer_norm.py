"""Layer normalisation, with weight and bias."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.module import Module, Slot


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba, Kiros, Hinton 2016).

    Args:
        size: of the last dimension.
        eps: added to the variance.
        name: the checkpoint's, without ".weight" and ".bias".
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        self._ops, self.size, self.eps, self.name = context.ops, size, eps, name
        self._dtype, self._device = context.dtype, context.device
        self._tensors: dict[str, torch.Tensor] = {}

    def slots(self) -> list[Slot]:
        """`<name>.weight` and `<name>.bias`, [size] each."""
        return [Slot(f"{self.name}.{kind}", (self.size,), self, kind) for kind in ("weight", "bias")]

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy one of them, cast to the model's dtype."""
        self._tensors[slot.key] = torch.empty(slot.shape, dtype=self._dtype, device=self._device)
        self._tensors[slot.key].copy_(tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.layer_norm(x, self._tensors["weight"], self._tensors["bias"], self.eps)
