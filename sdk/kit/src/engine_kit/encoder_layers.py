"""Layers of encoders, and of decoders that are not Llama's: LayerNorm, tables of learned vectors."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Module, Param, Weight


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension (Ba, Kiros, Hinton 2016).

    Args:
        size: of the last dimension.
        eps: added to the variance.
        name: the checkpoint's, without ".weight" and ".bias".
        bias: False for a norm without.
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str, bias: bool = True) -> None:
        self._ops = context.ops
        self.size = size
        self.eps = eps
        self.name = name
        self._dtype = context.dtype
        self._device = context.device
        self._stored = ("weight", "bias") if bias else ("weight",)
        self._tensors = {} if bias else {"bias": torch.zeros(size, dtype=context.dtype, device=context.device)}

    def params(self) -> list[Param]:
        """`<name>.weight` and, with a bias, `<name>.bias`, [size] each."""
        return [Param(f"{self.name}.{kind}", (self.size,), self, kind) for kind in self._stored]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy one of them, cast to the model's dtype."""
        self._tensors[param.key] = torch.empty(param.shape, dtype=self._dtype, device=self._device)
        self._tensors[param.key].copy_(tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.layer_norm(x, self._tensors["weight"], self._tensors["bias"], self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) for x, residual [T, size]; without a residual, (norm(x), x)."""
        total = x if residual is None else self._ops.add(x, residual)
        return self(total), total


class Table(Weight):
    """index [T] -> [T, size].

    Args:
        rows: in the checkpoint.
        name: the checkpoint's, without ".weight".
        first: the row that index 0 means; those before it are never read.
    """

    def __init__(self, context: ModelContext, rows: int, size: int, name: str, first: int = 0) -> None:
        super().__init__(context, (rows, size), name)
        self._first = first

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        """index int [T] -> [T, size]."""
        return self._ops.embedding(index, self.weight[self._first :])
