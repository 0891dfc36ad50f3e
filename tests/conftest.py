"""What holds for every test of the whole system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what is made for their module, which mostly is a server, run in one of pytest's processes: there
    it is made once. Those that use the server of `serving/conftest.py` share that."""
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("xdist_group") is not None:
            continue
        fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        if HERE / "serving" in item.path.parents and "server" in fixtures:
            item.add_marker(pytest.mark.xdist_group("serving"))
        elif any(definitions[-1].scope == "module" for definitions in fixtures.values()):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(HERE))))


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
