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
    """The suites of a module that has `QUICK`, a pattern of tests' names: on a GPU its tests are marked `gpu`; where
    kernels are interpreted, those that the pattern does not find are marked `slow`."""
    for item in items:
        quick = getattr(getattr(item, "module", None), "QUICK", None)
        if quick is None:
            continue
        if torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)
        elif not re.search(quick, item.name):
            item.add_marker(pytest.mark.slow)
