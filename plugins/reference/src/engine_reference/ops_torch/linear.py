"""The linear layer, and the one whose heads have a matrix each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class PackedLinear(NamedTuple):
    """What `pack_linear` makes: here the weights as they are, [O, I] and [O]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Linear:
    """x @ weight.T + bias."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [O, I], bias [O] -> what `linear` takes. The tensors are kept, not copied."""
        return PackedLinear(weight, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        return F.linear(x, packed.weight, packed.bias)

    def linear_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, H, I], weight [H, O, I] -> [T, H, O]: out[t, h] = weight[h] @ x[t, h]."""
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
