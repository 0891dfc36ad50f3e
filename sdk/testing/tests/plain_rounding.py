"""A quantization driver whose layers round rows as they are made, in plain torch: written to be broken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.quantization import LayerShape
from engine_reference.quantization_absmax.absmax import AbsmaxBody, Rounded


class PlainRounds(NamedTuple):
    """See `engine_kit.rounded_rows.RoundsRows`. Rows are 8 bits by the largest of each."""

    rounded: Rounded
    body: Any

    def rounds(self, rows: int) -> bool:
        return True

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else self.body.added(x, residual)
        return self.body.product(self.body.normed(total, norm, eps), self.rounded, x.dtype), total.to(x.dtype)

    def after_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        parts = (gate_up if gate_up.dtype == torch.float64 else gate_up.float()).chunk(2, dim=-1)
        return self.body.product(self.body.acted(*parts, gate_up.dtype), self.rounded, gate_up.dtype)


class PlainRounding(AbsmaxBody):
    """See `engine.interfaces.quantization.Quantization`."""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        return PlainRounds(super().pack(layer, tensors), self)

    def packed_bytes(self, packed: Any) -> int:
        return super().packed_bytes(packed.rounded)

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return self.product(self.coded(x), packed.rounded, x.dtype)

    def product(self, rows: tuple[torch.Tensor, torch.Tensor], rounded: Rounded, dtype: torch.dtype) -> torch.Tensor:
        codes, steps = rows
        return super().linear((codes * steps).to(dtype), rounded)

    def coded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = rows.double()
        steps = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-300)
        return (wide / steps).round(), steps

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + residual

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return self.coded(self.weighed(scaled.to(norm.dtype), norm))

    def weighed(self, normed: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return normed * norm

    def acted(self, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.coded((F.silu(gate) * up).to(dtype))
