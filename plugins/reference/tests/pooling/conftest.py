"""Makes the helpers of these and of the parity and distributed tests importable; one folder for the checkpoints."""

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent.parent
_CORE = Path(__file__).parents[4] / "core" / "tests"
sys.path[:0] = [*(str(_TESTS / name) for name in ("pooling", "parity")), str(_CORE / "distributed")]

from pooling_models import PoolingCheckpoints  # noqa: E402


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> PoolingCheckpoints:
    """`checkpoints(architecture, **features)` is the folder of such a checkpoint; each is made once."""
    return PoolingCheckpoints(tmp_path_factory.mktemp("checkpoints"))
