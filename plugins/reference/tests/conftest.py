"""Makes parity's `checkpoints`, the modeling tests' `plain` and the KV tests' `evictors` importable; and one folder for
the checkpoints made."""

import sys
from pathlib import Path

import pytest

_CORE = Path(__file__).parents[3] / "core" / "tests"
sys.path[:0] = [str(Path(__file__).parent / "parity"), *(str(_CORE / name) for name in ("modeling", "kv", "loop"))]

from checkpoints import Checkpoints  # noqa: E402


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(architecture, **features)` is the folder of such a checkpoint; each is made once."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
