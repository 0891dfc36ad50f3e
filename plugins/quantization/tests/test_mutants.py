"""Readers with one planted fault each: the suite finds every one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from written import CASES, Case

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine.interfaces.quantization import LayerShape
from engine_quantization.body import TorchBody
from engine_quantization.readers import Codes
from engine_sdk.conformance import QuantizationConformance


class ZeroOffByOne(TorchBody):
    """the code that stands for zero is one more than it is"""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        assert codes.zeros is not None
        return super()._packed(layer, codes._replace(zeros=codes.zeros + 1), bias)


class GroupsAlongOutputs(TorchBody):
    """groups are counted along the outputs"""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        turned = codes.scales.T.flatten().view(codes.scales.shape)
        return super()._packed(layer, codes._replace(scales=turned), bias)


class OrderIgnored(TorchBody):
    """groups are taken to follow one another, whatever their order is"""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        return super()._packed(layer, codes._replace(group_of=None), bias)


class ScaleOfTheNeighbour(TorchBody):
    """an output has the scales of the one beside it"""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        return super()._packed(layer, codes._replace(scales=codes.scales.roll(1, 0)), bias)


class NibblesTurned(TorchBody):
    """each two neighbouring codes have changed places"""

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Any:
        turned = codes.codes.unflatten(1, (-1, 2)).flip(2).flatten(1)
        return super()._packed(layer, codes._replace(codes=turned), bias)


class LegacyIgnored(TorchBody):
    """zeros of the first version are taken as they are"""

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        form = self._form
        self._form = lambda given: form(given)._replace(legacy=False)  # type: ignore[method-assign]
        try:
            return super().pack(layer, tensors)
        finally:
            del self._form


class OfMutant(QuantizationConformance):
    """The suite, of a case with a faulty body."""

    driver = "stored"
    case: ClassVar[Case]
    faulty: ClassVar[type]
    __test__ = False

    @classmethod
    def body(cls) -> type:
        return cls.faulty

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        tensors, meant = cls.case.write(name, weight.numpy())
        return {**tensors, f"{name}.bias": bias}, torch.from_numpy(meant)


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (ZeroOffByOne, "awq"),
        (ZeroOffByOne, "w4a16 asymmetric"),
        (GroupsAlongOutputs, "awq"),
        (GroupsAlongOutputs, "deepseek"),
        (OrderIgnored, "gptq ordered"),
        (OrderIgnored, "w4a16 ordered"),
        (ScaleOfTheNeighbour, "gptq"),
        (ScaleOfTheNeighbour, "nf4 nested"),
        (NibblesTurned, "nf4"),
        (LegacyIgnored, "gptq asymmetric v1"),
        (TorchBody, "awq"),
        (TorchBody, "gptq ordered"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_suite_finds_it(faulty: type, name: str) -> None:
    """And finds nothing in the body that is sound."""
    case = CASES[name]
    suite: Any = type("Suite", (OfMutant,), {"case": case, "stored": case.stored, "faulty": faulty})()
    if faulty is TorchBody:
        return suite.test_stored_layers("parts", 1)
    with pytest.raises(BaseException, match="weights are not those that were stored"):
        suite.test_stored_layers("parts", 1)
    return None
