"""The body of the linear layer for few rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.types.errors import ConfigError
from engine_cuda.dependents import DEPENDENT, depends
from engine_cuda.ops_triton.launching import power_of_2
from engine_cuda.ops_triton_gemv.cuts import MOST_INPUTS, MOST_NORMED, MOST_ROWS, MatrixCut, cut_of
from engine_cuda.ops_triton_gemv.kernel import few_rows_kernel
from engine_cuda.ops_triton_gemv.timed import TimedProducts, machine_of

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cuda.ops_triton_gemv.card import TritonGemvOptions


class PackedWeight:
    """A matrix for few rows, and what lies around it: an `engine_kit.few_rows.AroundMatrix`.

    Args:
        weight: [O, I], dense.
        bias: [O], or None.
        dependent: see `few_rows`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dependent: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.dependent = dependent

    def fits(self, rows: int, normed: bool) -> bool:
        """Whether the kernel takes so many rows of as many inputs as there are."""
        outputs, inputs = self.weight.shape
        return 0 < rows <= MOST_ROWS and outputs > 0 and 0 < inputs <= (MOST_NORMED if normed else MOST_INPUTS)

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
        """The RMS norm of x [R, I], the product, and where `gated` silu of its first half times the second."""
        return few_rows(x, self, norm=norm, eps=eps, gated=gated)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product of x [R, I], and the residual [R, O]."""
        return few_rows(x, self, residual=residual)


class TritonGemvBody:
    """See `engine.interfaces.ops.Ops`. What is launched depends on shapes, and where asked for on what was timed.

    Raises ConfigError where products are to be timed and there is no GPU, or ranks that compute the same.
    """

    def __init__(self, context: WorkerContext | None) -> None:
        self._dependent = bool(depends(context))
        self._timed: TimedProducts | None = None
        options: TritonGemvOptions | None = None if context is None else context.options
        if context is not None and options is not None and options.choose == "time":
            if context.device is None or context.device.type != "cuda":
                raise ConfigError(
                    "ops.choose=time, products by what they take",
                    f"they would be computed on {context.device}, whose time says nothing of a GPU's",
                    "leave it out, or use a GPU",
                )
            parallel = context.start.parallel
            if parallel.tp * parallel.cp * parallel.dp > 1:
                raise ConfigError(
                    "ops.choose=time, products by what they take, on several ranks",
                    "each would find its own, and what all compute alike, a router's choice or a draw, would not be "
                    "alike in its last bits",
                    "leave it out, or use one rank",
                )
            file = Path(options.cache).expanduser() if options.cache else None
            self._timed = TimedProducts(few_rows, machine_of(context.device), file)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """weight [O, I], bias [O] -> what `linear` takes. Dense tensors are kept, not copied."""
        return PackedWeight(weight.contiguous(), None if bias is None else bias.contiguous(), self._dependent)

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""
        if self._timed is not None:
            return self._timed(x, packed)
        return few_rows(x, packed) if packed.fits(x.shape[0], False) else F.linear(x, packed.weight, packed.bias)


def few_rows(
    x: torch.Tensor,
    packed: PackedWeight,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool | None = None,
    cut: MatrixCut | None = None,
) -> torch.Tensor:
    """x [R, I] by the matrix, R at most MOST_ROWS, in one launch.

    Args:
        norm: weight [I] of the RMS norm that comes before, with `eps`.
        residual: [R, O], added to the results; not together with `gated`.
        gated: silu of the first half of the results times the second is given: [R, O / 2].
        dependent: whether the launch may begin before the one before it has ended, see `engine_cuda.dependents`; None
            for what the matrix was packed with.
        cut: in place of the table's.
    """
    weight, bias = packed.weight, packed.bias
    dependent = packed.dependent if dependent is None else dependent
    rows, (outputs, inputs) = x.shape[0], weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    cut = cut or cut_of(outputs, inputs, rows)
    out = x.new_empty(rows, outputs // 2 if gated else outputs)
    grid, once = cut.grid(outputs)
    few_rows_kernel[(grid,)](
        x, norm, weight, bias, residual, out, x.stride(0), 0 if residual is None else residual.stride(0), outputs, rows,
        eps, power_of_2(rows), inputs, cut.outputs, cut.width(inputs), gated, once, dependent, num_warps=cut.warps,
        **(DEPENDENT if dependent else {}),
    )  # fmt: skip
    return out
