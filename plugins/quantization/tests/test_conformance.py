"""Every form through the suite of engine-sdk, by both drivers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from written import CASES, Case

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import QuantizationConformance


class OfCase(QuantizationConformance):
    """What the suite asks for beside a driver. Plain weights are not rounded here, so that their tests are left out."""

    case: ClassVar[Case]
    __test__ = False

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        tensors, meant = cls.case.write(name, weight.numpy())
        return {**tensors, f"{name}.bias": bias}, torch.from_numpy(meant)


for name in dir(QuantizationConformance):
    if name.startswith("test_") and not any(
        word in name for word in ("card", "claimed", "covered", "stored", "refused")
    ):
        setattr(OfCase, name, None)


def _suites() -> dict[str, type]:
    found = {}
    for driver in ("stored", "stored-cpu"):
        for name, case in CASES.items():
            words = "".join(part.capitalize() for part in f"{driver} {name}".replace("-", " ").replace(".", "").split())
            members = {
                "driver": driver,
                "case": case,
                "stored": case.stored,
                "uncovered": case.uncovered,
                "__test__": True,
            }
            found[f"Test{words}"] = type(f"Test{words}", (OfCase, QuantizationConformance), members)
    return found


globals().update(_suites())
