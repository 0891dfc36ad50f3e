"""Driver `stored-triton` through the suite of engine-sdk: interpreted on the processor, and on a GPU where there is
one."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")

from of_case import base_of
from written import CASES

from engine_sdk.conformance import QuantizationConformance

QUICK = ("awq", "gptq ordered", "w8a8 asymmetric", "deepseek", "mxfp4", "nf4 nested")
EACH_WAY = r"^(?!test_stored_layers\[(one-2|parts|in one tensor-1|inputs-1))"
"""Interpreted kernels compute all ways to join and divide layers for the first of these. With the others each is tried
once: how they are read is the same code, and driver `stored` goes every way in `plugins/quantization/tests`."""


def _suites(device: str) -> dict[str, type]:
    found = {}
    for name, case in CASES.items():
        words = "".join(part.capitalize() for part in name.replace("-", " ").replace(".", "").split())
        members = {"driver": "stored-triton", "case": case, "stored": case.stored, "uncovered": case.uncovered}
        members |= {"__test__": True} | ({"device": "cuda"} if device == "cuda" else {"stand_in": "interpreted"})
        members |= {"quick": EACH_WAY} if device != "cuda" and name != QUICK[0] else {}
        title = f"Test{words}{device.capitalize()}"
        found[title] = type(title, (base_of(name), QuantizationConformance), members)
        if device == "cuda":
            found[title] = pytest.mark.gpu(found[title])
        elif name not in QUICK:
            found[title] = pytest.mark.slow(found[title])
    return found


globals().update(_suites("interpreted"))
globals().update(_suites("cuda"))
