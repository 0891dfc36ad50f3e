"""What driver `humming` computes, by the published formulas alone: scales in the dtype of activations, weights widened
by them, products in float64."""

from __future__ import annotations

from typing import Any

import torch

from engine.interfaces.quantization import LayerShape
from engine_quantization.body import Kept, TorchBody
from engine_quantization.readers import Codes


class OracleBody(TorchBody):
    """As `stored`, but for scales."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._dtype = context.dtype

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Kept:
        return super()._packed(layer, codes._replace(scales=codes.scales.to(self._dtype)), bias)

    def linear(self, x: torch.Tensor, packed: Kept) -> torch.Tensor:
        out = x.double() @ packed.weight(slice(None), torch.float64).T
        return (out if packed.bias is None else out + packed.bias.double()).to(x.dtype)
