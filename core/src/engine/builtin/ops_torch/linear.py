"""The linear layer."""

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
