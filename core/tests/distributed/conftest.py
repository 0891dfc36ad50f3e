"""Makes the ranks of these tests, and the checkpoints of the parity tests, importable."""

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[2] / "plugins" / "reference" / "tests" / "parity")]

from checkpoints import Checkpoints  # noqa: E402


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(architecture, **features)` is the folder of such a checkpoint; each is made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
