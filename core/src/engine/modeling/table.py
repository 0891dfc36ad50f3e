"""A small table of learned vectors that every rank holds in full: positions, token types."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.module import Module, Slot


class Table(Module):
    """index [T] -> [T, size].

    Args:
        rows: in the checkpoint.
        name: the checkpoint's, without ".weight".
        first: the row that index 0 means; those before it are never read.
    """

    def __init__(self, context: ModelContext, rows: int, size: int, name: str, first: int = 0) -> None:
        self._ops, self.name, self._first, self._shape = context.ops, name, first, (rows, size)
        self._dtype, self._device = context.dtype, context.device
        self._weight: torch.Tensor | None = None

    def slots(self) -> list[Slot]:
        """`<name>.weight` [rows, size]."""
        return [Slot(f"{self.name}.weight", self._shape, self)]

    def place(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Copy the rows that are read, cast to the model's dtype."""
        rows, size = self._shape
        self._weight = torch.empty((rows - self._first, size), dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor[self._first :])

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        """index int [T] -> [T, size]."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._ops.embedding(index, self._weight)
