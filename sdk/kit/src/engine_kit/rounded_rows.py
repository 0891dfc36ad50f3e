"""A pre-norm layer whose norms and activation round the rows that they make, where only a product reads them.

A product of rows in fewer bits has them rounded first, by a launch of its own that reads all that the norm, or the
activation, has just written. A driver of quantization whose `pack` gives a `RoundsRows` has both done in one; a layer
asks `RoundedRows` at each step, and computes as ever where that has done nothing.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import narrowed
from engine_kit.few_rows import are_plain


@runtime_checkable
class RoundsRows(Protocol):
    """What `Quantization.pack` may give: a matrix [O, I], with a bias perhaps, that rounds rows as they are made.
    They become what `Quantization.linear` would make of the operations' results, but for the order of sums; of which
    driver's operations, the quantization says."""

    def rounds(self, rows: int) -> bool:
        """Whether it does so with so many rows."""

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(rms_norm(x + residual, norm, eps)), x + residual): [T, O] and [T, I]; without a residual
        (linear(rms_norm(x, norm, eps)), x). x, residual [T, I] are used up, as by `Ops.add_rms_norm`; norm [I]."""

    def after_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """linear(silu_mul(gate_up)), [T, O]; gate_up [T, 2 * I]."""


class RoundedRows:
    """Computes a layer in the place of its blocks, where it can.

    That is where all of them are the plain ones (RMS norm, attention, silu) and what reads the norms is a `RoundsRows`
    without adapters. Over several ranks, which sum up the last product, the activation stays alone.

    Args:
        context: the model's.
        attention_norm, attention, mlp_norm, mlp: the layer's.
    """

    def __init__(self, context: ModelContext, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> None:
        blocks = (attention_norm, attention, mlp_norm, mlp)
        self._blocks = blocks if are_plain(*blocks) else None
        self._ops = context.ops
        self._matrices: tuple[Any, ...] = ()

    def __call__(self, state: State) -> bool:
        """Whether the layer is computed, as its blocks would have: `hidden` and `residual` are the next layer's."""
        if self._blocks is None:
            return False
        attention_norm, attention, mlp_norm, mlp = self._blocks
        if not self._matrices:  # known once the weights are loaded
            self._matrices = tuple(linear.matrix for linear in (attention.qkv, mlp.gate_up, mlp.down))
            if not all(isinstance(matrix, RoundsRows) for matrix in self._matrices[:2]):
                self._blocks = None
                return False
        qkv, gate_up, down = self._matrices
        if not qkv.rounds(len(state["hidden"])):
            return False
        y, residual = qkv.after_norm(state["hidden"], state.get("residual"), attention_norm.weight, attention_norm.eps)
        hidden = attention.o(attention.attended(*attention.qkv.parted(y), state["positions"]))
        hidden, residual = narrowed(self._ops, state, hidden, residual)
        if not gate_up.rounds(len(hidden)):  # the last layer's rows may be few
            hidden, residual = mlp_norm.add(hidden, residual)
            state["hidden"], state["residual"] = mlp(hidden), residual
            return True
        y, residual = gate_up.after_norm(hidden, residual, mlp_norm.weight, mlp_norm.eps)
        rounds = isinstance(down, RoundsRows) and down.rounds(len(y))
        state["hidden"] = down.after_silu(y) if rounds else mlp.down(self._ops.silu_mul(y))
        state["residual"] = residual
        return True
