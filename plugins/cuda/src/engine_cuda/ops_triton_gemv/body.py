"""The body of the linear layer for few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine_cuda.ops_triton_gemv.cuts import MOST_INPUTS, MOST_ROWS, MatrixCut, cut_of
from engine_cuda.ops_triton_gemv.kernel import few_rows_kernel

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class PackedWeight(NamedTuple):
    """weight [O, I], dense, and bias [O]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class TritonGemvBody:
    """See `engine.interfaces.ops.Ops`. Without state; what is launched depends on shapes alone."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """weight [O, I], bias [O] -> what `linear` takes. Dense tensors are kept, not copied."""
        return PackedWeight(weight.contiguous(), None if bias is None else bias.contiguous())

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""
        outputs, inputs = packed.weight.shape
        if not 0 < x.shape[0] <= MOST_ROWS or not outputs or not 0 < inputs <= MOST_INPUTS:
            return F.linear(x, packed.weight, packed.bias)
        return few_rows(x, packed)


def few_rows(
    x: torch.Tensor,
    packed: PackedWeight,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool = False,
    cut: MatrixCut | None = None,
) -> torch.Tensor:
    """x [R, I] by the matrix, R at most MOST_ROWS, in one launch.

    Args:
        norm: weight [I] of the RMS norm that comes before, with `eps`.
        residual: [R, O], added to the results; not together with `gated`.
        gated: silu of the first half of the results times the second is given: [R, O / 2].
        dependent: the launch may begin before the one before it ended (programmatic dependent launch, sm_90 and later).
        cut: in place of the table's.
    """
    weight, bias = packed
    rows, (outputs, inputs) = x.shape[0], weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    cut = cut or cut_of(outputs, inputs, rows)
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    grid, once = cut.grid(outputs)
    few_rows_kernel[(grid,)](
        x, norm, weight, bias, residual, out, x.stride(0), 0 if residual is None else residual.stride(0), outputs, eps,
        rows, inputs, cut.outputs, cut.width(inputs), gated, once, dependent, num_warps=cut.warps,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out
