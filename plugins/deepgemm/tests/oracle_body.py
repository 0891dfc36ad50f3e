"""What driver `deepgemm` computes, by the published formulas alone: weights widened by their blocks, rows rounded as
`per_token_cast_to_fp8` of the library does, products in float64."""

from __future__ import annotations

from typing import Any

import torch

from engine_quantization.body import Kept, TorchBody


def rounded_rows(x: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
    """x [T, I] -> float64: e4m3 with a scale for each 128 inputs, the largest over 448, or the next power of two."""
    inputs = x.shape[1]
    parts = torch.nn.functional.pad(x.float(), (0, -inputs % 128)).unflatten(1, (-1, 128))
    scales = (parts.abs().amax(2, keepdim=True) / 448).clamp(min=2.0**-120)
    if power_of_two:
        scales = torch.exp2(scales.double().log2().ceil()).float()
    return ((parts / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, :inputs]


class OracleBody(TorchBody):
    """As `stored`, but for rows."""

    def linear(self, x: torch.Tensor, packed: Kept) -> Any:
        out = (rounded_rows(x) @ packed.weight(slice(None), torch.float64).T).to(x.dtype)
        return out if packed.bias is None else out + packed.bias
