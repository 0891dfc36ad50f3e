"""Rows and elements: embedding, gather, add, scale, soft cap, activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_reference.ops_torch.precision import widened


class Elementwise:
    """Operations on single rows or elements."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int [T], weight [V, H] -> [T, H]."""
        return F.embedding(ids, weight)

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        """ids int [T], weight [V', H] -> [T, H]; zeros for ids outside first .. first + V' - 1."""
        local = ids - first
        outside = (local < 0) | (local >= len(weight))
        return F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[:, None], 0)

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [T, H], index int [R] -> [R, H]."""
        return x.index_select(0, index)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a + b, equal shapes."""
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x * factor."""
        return x * factor

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        return (torch.tanh(widened(x) / cap) * cap).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
        gate, up = widened(gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        """x * Phi(x); with `tanh` by its approximation."""
        return F.gelu(widened(x), approximate="tanh" if tanh else "none").to(x.dtype)
