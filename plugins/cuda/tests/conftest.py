"""Kernels are tried in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `compiled`

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a class that has `quick`, a pattern of tests' names, those that it does not find are marked `slow`: suites
    take a while in the interpreter."""
    for item in items:
        quick = getattr(getattr(item, "cls", None), "quick", None)
        if quick is not None and not re.search(quick, item.name):
            item.add_marker(pytest.mark.slow)
