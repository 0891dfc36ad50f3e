"""Every form through the suite of engine-sdk, by the drivers that need no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from of_case import base_of
from written import CASES

from engine_sdk.conformance import QuantizationConformance


def _suites() -> dict[str, type]:
    found = {}
    for driver in ("stored", "stored-cpu"):
        for name, case in CASES.items():
            words = "".join(part.capitalize() for part in f"{driver} {name}".replace("-", " ").replace(".", "").split())
            members = {"driver": driver, "case": case, "stored": case.stored, "uncovered": case.uncovered}
            members |= {"__test__": True}
            found[f"Test{words}"] = type(f"Test{words}", (base_of(name), QuantizationConformance), members)
    return found


globals().update(_suites())
