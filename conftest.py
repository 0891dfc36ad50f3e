"""What holds for every test of the workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SERVING = ROOT / "tests" / "serving"


def pytest_configure(config: pytest.Config) -> None:
    """A machine with a GPU may lack pytest-xdist, whose marker tests name."""
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group: tests that run in one process; here is only one")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share what is made for their module (a server, an engine, a trained model) run in one of pytest's
    processes: there it is made once. Those that use the server of `tests/serving/conftest.py` share that."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        if fixtures is None or item.get_closest_marker("xdist_group") is not None:
            continue
        if "server" in fixtures.name2fixturedefs and SERVING in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("serving"))
        elif any(definitions[-1].scope == "module" for definitions in fixtures.name2fixturedefs.values()):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
