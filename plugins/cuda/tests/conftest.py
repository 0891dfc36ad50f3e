"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from engine_sdk.interpreted import *  # noqa: F403

sys.path.insert(0, str(Path(__file__).parent))  # for `compiled`
DRIVERS = (
    "attention_mla",
    "attention_triton",
    "communicator_custom_allreduce",
    "ops_triton",
    "ops_triton_gemv",
    "quantization_fp8",
)
import_kernels(*(f"engine_cuda.{driver}" for driver in DRIVERS))  # noqa: F405


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a class that has `quick`, a pattern of tests' names, those that it does not find are marked `slow`: suites
    take a while in the interpreter."""
    for item in items:
        quick = getattr(getattr(item, "cls", None), "quick", None)
        if quick is not None and not re.search(quick, item.name):
            item.add_marker(pytest.mark.slow)
