"""Tests whose Triton kernels run in Triton's interpreter where there is no GPU.

A `conftest.py` beside such tests imports the hooks, and they hold for the tests below it alone:

    from engine_sdk.interpreted import *  # noqa: F403

    import_kernels("my_plugin.kernels")

Triton looks at its variable when a kernel is defined, its own library's kernels included. So the variable is set while
Triton, the test modules and what they test are imported, and while the tests run. It is not set for other tests of the
same process, nor for what they start: with it, drivers would offer to compute in the interpreter. `import_kernels` is
for kernels that a test finds through a driver's name: another test may have imported them before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch

__all__ = [
    "import_kernels",
    "pytest_make_collect_report",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
]

VARIABLE = "TRITON_INTERPRET"


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are defined meanwhile are interpreted, where there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        _import_triton()
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _import_triton() -> None:
    """Import it such that its own functions are interpreted too: anew, where somebody was earlier."""
    module = sys.modules.get("triton.language.standard")
    if module is not None and type(module.sum).__name__ != "InterpretedFunction":
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            if not name.startswith("triton._C"):  # compiled code cannot be imported twice
                del sys.modules[name]
    import_module("triton")


def import_kernels(*packages: str) -> None:
    """Import all modules of these packages now, their kernels to be interpreted where there is no GPU."""
    with interpreting():
        for package in packages:
            for module in walk_packages(import_module(package).__path__, f"{package}."):
                import_module(module.name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, object, object]:
    """Test modules are imported here."""
    with interpreting():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Fixtures of every scope begin here."""
    with interpreting():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """The test itself."""
    with interpreting():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fixtures of every scope end here."""
    with interpreting():
        return (yield)
