"""Makes the helpers of these and of the loop, runner and attention tests importable."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent.parent
_REFERENCE = Path(__file__).parents[3] / "plugins" / "reference" / "tests"
sys.path[:0] = [
    *(str(_TESTS / name) for name in ("system", "loop", "runner", "distributed")),
    str(_REFERENCE / "attention"),
]

from thread_ranks import ThreadExecutor  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def crews_end() -> Iterator[None]:
    """Ranks that tests share, as threads, end with the last test."""
    yield
    for crew in list(ThreadExecutor.started):
        crew.shutdown()
