"""Single elements, the norm with a mean, and the check of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_cpu._native import Ops
from engine_cpu.dtypes import DTYPES

_ADD, _SCALE, _SOFT_CAP, _GELU, _GELU_TANH, _RELU, _RELU_SQUARED = range(7)
"""What to do, by the numbers of native/elementwise.h."""


class Elementwise:
    """See `engine.interfaces.ops.Ops`."""

    _ops: Ops
    _dense: Callable[[torch.Tensor], torch.Tensor]

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a + b, equal shapes."""
        return self._each(_ADD, a, self._dense(b))

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x * factor."""
        return self._each(_SCALE, x, None, factor)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        return self._each(_SOFT_CAP, x, None, cap)

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        """x * Phi(x); with `tanh` by its approximation."""
        return self._each(_GELU_TANH if tanh else _GELU, x)

    def relu(self, x: torch.Tensor, squared: bool) -> torch.Tensor:
        """max(x, 0); with `squared` its square."""
        return self._each(_RELU_SQUARED if squared else _RELU, x)

    def _each(self, what: int, x: torch.Tensor, y: torch.Tensor | None = None, factor: float = 0.0) -> torch.Tensor:
        x = self._dense(x)
        out = torch.empty_like(x)
        self._ops.elementwise(
            DTYPES[x.dtype], what, x.data_ptr(), 0 if y is None else y.data_ptr(), factor, x.numel(), out.data_ptr()
        )
        return out

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., H], weight and bias [H]."""
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size if size else 0
        self._ops.layer_norm(
            DTYPES[x.dtype], x.data_ptr(), rows, size, weight.data_ptr(), bias.data_ptr(), out.data_ptr(), eps
        )
        return out

    def check_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (the same in float32, bool [R]: which rows hold a NaN)."""
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        rows, size = logits.shape
        out = logits if logits.dtype == torch.float32 else torch.empty(rows, size)
        broken = torch.empty(rows, dtype=torch.bool)
        self._ops.check_logits(
            DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, size,
            0 if out is logits else out.data_ptr(), broken.data_ptr(),
        )  # fmt: skip
        return out, broken
