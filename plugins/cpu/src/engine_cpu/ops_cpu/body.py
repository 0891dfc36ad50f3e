"""The body of the native operations: tensors to addresses, for the kernels of one level."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine.types.errors import ConfigError
from engine_cpu._native import Ops, levels, use_huge_pages
from engine_cpu._native import Sampling as Kernels
from engine_cpu.dtypes import DTYPES
from engine_cpu.ops_cpu.elementwise import Elementwise
from engine_cpu.ops_cpu.rows import Rows
from engine_cpu.ops_cpu.sampling import Sampling

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.ops_cpu.card import CpuOpsOptions

MOST_ROWS = {torch.bfloat16: 16, torch.float32: 64}
"""Up to so many rows the weights' way from memory is what takes time, and the own kernel is faster than oneDNN."""
MANY_BYTES = 4 << 20
"""Smaller weights gain nothing from huge pages."""


class PackedLinear(NamedTuple):
    """The weights as they are, [O, I] dense and [O], on huge pages where they are large."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class CpuOpsBody(Rows, Elementwise, Sampling):
    """See `engine.interfaces.ops.Ops`. Of the dtypes of the card, on as many threads as torch."""

    def __init__(self, context: WorkerContext) -> None:
        options: CpuOpsOptions = context.options
        self._threads = torch.get_num_threads()
        try:
            self._ops = Ops(options.level, self._threads)
            self._sampling = Kernels(options.level, self._threads)
        except ValueError as error:
            raise ConfigError(
                f"ops.level {options.level}", str(error), f"choose auto or one of {', '.join(levels())}"
            ) from error

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [O, I], bias [O]. The weight stays where it is; its memory is put onto huge pages."""
        weight = weight.contiguous()
        if weight.nbytes >= MANY_BYTES:
            use_huge_pages(weight.data_ptr(), weight.nbytes)
        return PackedLinear(weight, None if bias is None else bias.contiguous())

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        weight, bias = packed
        rows = x.shape[0]
        if not 0 < rows <= MOST_ROWS[weight.dtype] or x.stride(-1) != 1:
            return F.linear(x, weight, bias)
        outputs, inputs = weight.shape
        out = x.new_empty((rows, outputs))
        self._ops.linear(
            DTYPES[weight.dtype], x.data_ptr(), x.stride(0), rows, inputs, outputs, weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H], dense in its last dimension."""
        shape = x.shape
        if x.dim() != 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, 1, shape[-1])
        rows, heads, size = x.shape
        out = x.new_empty(shape)
        self._ops.norm(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(1), rows, heads, size, weight.data_ptr(),
            out.data_ptr(), eps,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place, where both are dense."""
        x, residual = x.contiguous(), residual.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size if size else 0
        self._ops.add_norm(
            DTYPES[x.dtype], x.data_ptr(), residual.data_ptr(), rows, size, weight.data_ptr(), eps
        )  # fmt: skip
        return x, residual

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place, where heads are dense."""
        return self._rotated(q, positions, cos_sin), self._rotated(k, positions, cos_sin)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        self._ops.rope(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(1), x.shape[0], x.shape[1], cos_sin.shape[1],
            positions.data_ptr(), cos_sin.data_ptr(),
        )  # fmt: skip
        return x

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> [T, I]."""
        if gate_up.stride(-1) != 1:
            gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._ops.silu_mul(
            DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), rows, size, out.data_ptr()
        )  # fmt: skip
        return out
