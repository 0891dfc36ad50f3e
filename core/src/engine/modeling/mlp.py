"""The feed-forward block of a decoder layer."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.linear import MergedColumnLinear, RowParallelLinear
from engine.modeling.module import Module


class GatedMLP(Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020).

    Args:
        name: the checkpoint's, e.g. "model.layers.0.mlp".
        bias: whether all three projections have one.
    """

    def __init__(
        self, context: ModelContext, hidden_size: int, intermediate_size: int, name: str, bias: bool = False
    ) -> None:
        self._ops = context.ops
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = MergedColumnLinear(context, hidden_size, [intermediate_size] * 2, names, bias)
        self.down = RowParallelLinear(context, intermediate_size, hidden_size, f"{name}.down_proj", bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.down(self._ops.silu_mul(self.gate_up(x)))
