"""A pre-norm layer by four products that take in what lies around them, for steps of few rows.

With few rows each product waits for its matrix to come from memory, and whatever is launched between two of them only
makes both wait. A driver of ops whose `pack_linear` gives an `AroundMatrix` offers such products; a layer asks
`FewRows` at each step, and computes as ever where that has done nothing.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import Attention, GatedMLP, RMSNorm


@runtime_checkable
class AroundMatrix(Protocol):
    """What `Ops.pack_linear` may give: a matrix [O, I], with a bias perhaps, whose product takes in what a layer has
    before and behind it. Results are rounded where the operations, one after the other, round theirs."""

    def fits(self, rows: int, normed: bool) -> bool:
        """Whether so many rows are worth it, of `normed` or of `added`."""

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
        """linear(rms_norm(x, norm, eps)), [R, O]; where `gated` silu_mul of that, [R, O / 2]. x [R, I], norm [I]."""

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """linear(x) + residual, [R, O]: a tensor of its own. x [R, I], residual [R, O]."""


def are_plain(attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> bool:
    """Whether a pre-norm layer's blocks are an RMS norm, attention, an RMS norm and a gated MLP with silu: no subclass,
    which may compute something else."""
    kinds = tuple(map(type, (attention_norm, attention, mlp_norm, mlp)))
    return kinds == (RMSNorm, Attention, RMSNorm, GatedMLP) and mlp.act == "silu"


class FewRows:
    """Computes a layer in the place of its blocks, where it can.

    That is where all of them are the plain ones (RMS norm, attention, silu), on one rank and one stage, and all four
    matrices are an `AroundMatrix`: neither quantised nor with adapters.

    Args:
        context: the model's.
        attention_norm, attention, mlp_norm, mlp: the layer's.
    """

    def __init__(self, context: ModelContext, attention_norm: Any, attention: Any, mlp_norm: Any, mlp: Any) -> None:
        blocks = (attention_norm, attention, mlp_norm, mlp)
        self._blocks = blocks if are_plain(*blocks) and context.stage.first and context.stage.last else None
        self._ops = context.ops
        self._matrices: tuple[AroundMatrix, ...] = ()

    def __call__(self, state: State) -> bool:
        """Whether the layer is computed: `hidden` then holds all that was added up, and `residual` is gone."""
        if self._blocks is None:
            return False
        attention_norm, attention, mlp_norm, mlp = self._blocks
        if not self._matrices:  # known once the weights are loaded
            found = [linear.matrix for linear in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
            if not all(isinstance(matrix, AroundMatrix) for matrix in found):
                self._blocks = None
                return False
            self._matrices = tuple(found)
        qkv, output, gate_up, down = self._matrices
        x, residual = state["hidden"], state.get("residual")
        rows = len(x)
        if not (qkv.fits(rows, True) and output.fits(rows, False) and gate_up.fits(rows, True)):
            return False
        if not down.fits(rows, False):
            return False
        if residual is not None:
            x = self._ops.add(x, residual)
            del state["residual"]
        parts = attention.qkv.parted(qkv.normed(x, attention_norm.weight, attention_norm.eps, False))
        x = output.added(attention.attended(*parts, state["positions"]), x)
        state["hidden"] = down.added(gate_up.normed(x, mlp_norm.weight, mlp_norm.eps, True), x)
        return True
