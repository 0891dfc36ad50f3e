"""What the suite asks for beside a driver, for each form of `written`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from written import Case

from engine_sdk.conformance import QuantizationConformance


class OfCase(QuantizationConformance):
    """Plain weights are not rounded here: their tests are left out."""

    case: ClassVar[Case]
    __test__ = False

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        tensors, meant = cls.case.write(name, weight.cpu().numpy())
        bound = {**tensors, f"{name}.bias": bias}
        return {key: tensor.to(cls.device) for key, tensor in bound.items()}, torch.from_numpy(meant).to(cls.device)


_OF_STORED = ("card", "claimed", "covered", "stored_layers", "refused")
for _name in dir(QuantizationConformance):
    if _name.startswith("test_") and not any(word in _name for word in _OF_STORED):
        setattr(OfCase, _name, None)
