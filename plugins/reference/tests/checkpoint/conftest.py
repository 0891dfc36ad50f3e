"""Makes parity's `checkpoints` importable, and one folder a session for the checkpoints made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))

from checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(architecture, **features)` is the folder of such a checkpoint; each is made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
