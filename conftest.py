"""What holds for every test of the workspace."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent
TEMPLATE: list[Any] = []
SERVING = ROOT / "tests" / "serving"

# How fast examples are drawn and tried says how loaded a machine is, not whether the code is right.
settings.register_profile("engine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("engine")


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


def pytest_collection_finish() -> None:
    """What stands now stands until the end, torch and ten thousand tests among it: collections need not look at it."""
    gc.collect()
    gc.freeze()


NEVER_RUN = ("no GPU", "no device 'cuda'", "avx512_amx", "no neon")
"""Parts of the reasons for which tests are skipped on every machine that we have had: see CONTRIBUTING.md."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, a line a reason: those that no machine of ours has met first."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts[reason.removeprefix("Skipped: ").partition("\n")[0]] += 1
    if not counts:
        return
    terminalreporter.section("skipped, by reason")
    for never in (True, False):
        rows = [(n, why) for why, n in counts.items() if any(part in why for part in NEVER_RUN) == never]
        terminalreporter.line(f"{sum(n for n, _ in rows)} {'never run on a machine of ours' if never else 'others'}")
        for n, why in sorted(rows, reverse=True):
            terminalreporter.line(f"  {n:>5}  {why[:100]}")


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


@pytest.fixture(scope="session", autouse=True)
def template() -> Iterator[None]:
    """Processes that tests start are forks of one that has torch imported: see `tests/template.py`."""
    within = subprocess.Popen.__module__ != "subprocess"  # a session that a test runs: the outer one's template serves
    if within or sys.platform != "linux" or "PLAIN_PROCESSES" in os.environ:
        yield
        return
    found = runpy.run_path(str(ROOT / "tests" / "template.py"), run_name="template")
    TEMPLATE.append(found["Template"]())
    found["install"](TEMPLATE[0])
    yield
    TEMPLATE[0].close()


@pytest.fixture
def plain_processes() -> Iterator[None]:
    """In this test, processes are started as users start them."""
    for one in TEMPLATE:
        one.plainly += 1
    yield
    for one in TEMPLATE:
        one.plainly -= 1


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C arrives, also in the processes that tests start: a shell starts background jobs with SIGINT ignored, and
    children inherit that."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
