"""What the suite asks for beside a driver, for each form of `written`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from written import Case

from engine_sdk.conformance import QuantizationConformance


class OfCase(QuantizationConformance):
    """A form, through the whole suite."""

    case: ClassVar[Case]
    __test__ = False

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        tensors, meant = cls.case.write(name, weight.cpu().numpy())
        bound = {**tensors, f"{name}.bias": bias}
        return {key: tensor.to(cls.device) for key, tensor in bound.items()}, torch.from_numpy(meant).to(cls.device)


class OfForm(OfCase):
    """Plain weights are not rounded here, which one form has said for all: their tests are left out."""


_OF_STORED = ("card", "claimed", "covered", "stored_layers", "refused")
for _name in dir(QuantizationConformance):
    if _name.startswith("test_") and not any(word in _name for word in _OF_STORED):
        setattr(OfForm, _name, None)


def base_of(name: str) -> type:
    """What the suite of a form is made of."""
    return OfCase if name == "awq" else OfForm
