"""How a checkpoint stores weights for the driver of the package `engine-times3`."""

from __future__ import annotations

from typing import Any

import torch

STORED: dict[str, Any] = {"quant_method": "times3", "ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}


def thirds(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a weight, int8, and what they stand for, in float64."""
    codes = (weight / 3).round().clamp(-128, 127).to(torch.int8)
    return codes, 3 * codes.double()


class Times3Suite:
    """What the suite asks for beside the card."""

    stored = STORED
    uncovered = STORED["ignore"]

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, meant = thirds(20 * weight)
        return {f"{name}.third": codes, f"{name}.bias": bias}, meant
