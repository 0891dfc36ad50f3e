"""Root mean square normalisation."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.module import Module, Slot


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang, Sennrich 2019).

    Args:
        size: of the last dimension: hidden_size, or head_size where each head is normed alone.
        eps: added to the mean.
        name: the checkpoint's, without ".weight".
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        self._ops, self.size, self.eps, self.name = context.ops, size, eps, name
        self._dtype, self._device = context.dtype, context.device
        self._weight: torch.Tensor | None = None

    def slots(self) -> list[Slot]:
        """`<name>.weight` [size]."""
        return [Slot(f"{self.name}.weight", (self.size,), self)]

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy the weight, cast to the model's dtype."""
        self._weight = torch.empty(slot.shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)

    @property
    def weight(self) -> torch.Tensor:
        """[size], once it is loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) for x, residual [T, size]; without a residual, (norm(x), x).

        The inputs are used up: the ops driver may write into their memory.
        """
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self.eps), x
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
