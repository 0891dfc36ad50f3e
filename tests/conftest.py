"""What holds for every test of the whole system."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers remember of broken plugins is for this run of the tests alone."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
