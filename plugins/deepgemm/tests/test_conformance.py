"""Driver `deepgemm` through the suite of its point, over the double of its library."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import deepgemm_cards
from of_case import OfForm
from written import CASES

from engine_sdk.conformance import QuantizationConformance


class OverDouble(OfForm, QuantizationConformance):
    """DeepSeek's form: joined parts, parts of ranks, and rows rounded in groups."""

    card = deepgemm_cards.DoubleDeepGemm
    case = CASES["deepseek"]
    stored = CASES["deepseek"].stored
    uncovered = CASES["deepseek"].uncovered


class TestDeepGemm(OverDouble):
    __test__ = True


@pytest.mark.slow
class TestCompressedTensors(OverDouble):
    """The same of compressed-tensors, whose blocks `test_layouts` multiplies with."""

    case = CASES["fp8 block"]
    stored = CASES["fp8 block"].stored
    uncovered = CASES["fp8 block"].uncovered
    __test__ = True
