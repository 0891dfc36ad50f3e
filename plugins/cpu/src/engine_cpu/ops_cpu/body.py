"""The body of the native operations: tensors to addresses, for the kernels of one level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.types.errors import ConfigError
from engine_cpu._native import ExpertOps, LoraOps, Ops, StateKernels, levels
from engine_cpu._native import Sampling as Kernels
from engine_cpu.dtypes import DTYPES
from engine_cpu.ops_cpu.adapters import Adapters
from engine_cpu.ops_cpu.elementwise import Elementwise
from engine_cpu.ops_cpu.experts import Experts
from engine_cpu.ops_cpu.rows import Rows
from engine_cpu.ops_cpu.sampling import Sampling
from engine_cpu.ops_cpu.states import States
from engine_cpu.packed import Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.ops_cpu.card import CpuOpsOptions


class CpuOpsBody(Rows, Elementwise, States, Experts, Adapters, Sampling):
    """See `engine.interfaces.ops.Ops`. Of the dtypes of the card, on as many threads as torch."""

    def __init__(self, context: WorkerContext) -> None:
        options: CpuOpsOptions = context.options
        self._threads = torch.get_num_threads()
        try:
            self._ops = Ops(options.level, self._threads)
            self._sampling = Kernels(options.level, self._threads)
            self._states = StateKernels(options.level, self._threads)
        except ValueError as error:
            raise ConfigError(
                f"ops.level {options.level}", str(error), f"choose auto or one of {', '.join(levels())}"
            ) from error
        self._linear = PackedLinear("ops", options.level)
        self._adapters = LoraOps(options.level, self._threads)
        self._inner = torch.empty(0, dtype=torch.uint8)
        self._outgrown = []
        self._routing = ExpertOps(options.level, self._threads)
        self._products = ExpertProducts(options.level)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """weight [O, I], bias [O]; a copy is made, and neither is kept."""
        return self._linear.pack(str(weight.dtype).removeprefix("torch."), weight, bias)

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""
        return self._linear.linear(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H], dense in its last dimension."""
        shape = x.shape
        if x.dim() == 2 and x.stride(-1) == 1:
            x = x.unsqueeze(1)
        elif x.dim() != 3 or x.stride(-1) != 1:
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

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two kernels for queries and two for keys, what the norms give being rotated in place."""
        return self.rope(self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), positions, cos_sin)

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
