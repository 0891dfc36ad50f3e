"""What holds for every test of the whole system."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers remember of broken plugins is for this run of the tests alone. Few of them are asked for structured
    outputs: grammars warm up only where a test says so."""
    own = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "ENGINE_GRAMMAR_WARM_UP": "false"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
