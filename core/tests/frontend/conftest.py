from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    # Test folders are no packages (import-mode importlib), so what lies beside a test is loaded by its path.
    spec = importlib.util.spec_from_file_location(f"frontend_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def doubles() -> ModuleType:
    """`doubles.py`: a tokenizer of characters and a scripted core."""
    return _load("doubles")
