"""Makes `written`, and parity's `checkpoints` of the reference drivers' tests, importable; and one folder for the
checkpoints made."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "reference" / "tests" / "parity")]

from checkpoints import Checkpoints  # noqa: E402


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(architecture, **features)` is the folder of such a checkpoint; each is made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
