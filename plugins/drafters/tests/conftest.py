"""Makes `published` and `proposals` importable, and helpers of the core's own tests and of the reference drivers'."""

import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_CORE, _REFERENCE = _ROOT / "core" / "tests", _ROOT / "plugins" / "reference" / "tests"
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(_CORE / name) for name in ("modeling", "system", "loop", "runner", "distributed")),
    *(str(_REFERENCE / name) for name in ("parity", "attention")),
]

import proposals as recorded  # noqa: E402 (only now can it be found)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[recorded.Drafted]:
    """All that drafters of this package propose in this process."""
    return recorded.record(monkeypatch)
