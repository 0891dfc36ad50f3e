from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    # Test folders are no packages (import-mode importlib), so what lies beside a test is loaded by its path.
    spec = importlib.util.spec_from_file_location(f"tokenizer_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_helper() -> Callable[[str], ModuleType]:
    """Loads a module of this folder."""
    return _load


@pytest.fixture(scope="session")
def builders() -> ModuleType:
    """`builders.py`: small tokenizers of every family."""
    return _load("builders")
