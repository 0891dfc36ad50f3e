"""Driver `humming` through the suite of its point, over the double of its library."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import humming_cards
from of_case import OfForm
from written import CASES

from engine_sdk.conformance import QuantizationConformance

SERVED = [name for name in CASES if "nf4" not in name]
QUICK = ("awq", "gptq ordered", "w8a8 asymmetric", "deepseek", "mxfp4")


class OverDouble(OfForm, QuantizationConformance):
    card = humming_cards.DoubleHumming


def _suites() -> dict[str, type]:
    found = {}
    for name in SERVED:
        case = CASES[name]
        words = "".join(part.capitalize() for part in name.replace("-", " ").replace(".", "").split())
        members: dict[str, Any] = {"case": case, "stored": case.stored, "uncovered": case.uncovered, "__test__": True}
        if name != QUICK[0]:  # what does not turn on the form
            members |= dict.fromkeys(m for m in dir(OverDouble) if m.startswith(("test_card_", "test_body_")))
        suite = type(f"Test{words}", (OverDouble,), members)
        found[suite.__name__] = suite if name in QUICK else pytest.mark.slow(suite)
    return found


globals().update(_suites())
