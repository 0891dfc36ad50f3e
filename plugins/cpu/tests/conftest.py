"""Tests of native code run where it is built; `engine plugins why communicator` says why it is not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def native():
    """The native module."""
    return pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
