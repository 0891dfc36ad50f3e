"""What holds for every test of the workspace."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent
TEMPLATE: list[Any] = []
SERVING = ROOT / "tests" / "serving"
TEMPORARY = ("engine", "thread-ranks-", "tmp")
"""Beginnings of names that we give temporary files. Libraries leave others, and so does a process that is killed while
`tempfile` tries where it can write."""

LONGEST = 300.0
"""Seconds that a test may take, unless it is marked `slow` or `gpu`. It takes ten at most on two cores, or
ten times as many examples of three seconds."""
SAID: list[int] = []
"""The descriptor of standard error, which pytest captures while a test runs."""

# How fast examples are drawn and tried says how loaded a machine is, not whether the code is right.
# `make test` tries the same examples each time; `make test-all`, which says how many, draws new ones.
settings.register_profile(
    "engine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="EXAMPLES" not in os.environ
)
settings.load_profile("engine")


def pytest_configure(config: pytest.Config) -> None:
    """A machine with a GPU may lack pytest-xdist, whose marker tests name."""
    SAID[:] = [os.dup(2)]
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group: tests that run in one process; here is only one")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a class that has `quick`, a pattern of tests' names, those that it does not find are marked `slow`; so are the
    suites' figures, which tell how fast a driver is and assert nothing.

    Tests that share what is made for their module (a server, an engine, a trained model) run in one of pytest's
    processes: there it is made once. Those that use the server of `tests/serving/conftest.py` share that."""
    for item in items:
        quick = getattr(getattr(item, "cls", None), "quick", None)
        if item.name == "test_figure" or (quick is not None and not re.search(quick, item.name)):
            item.add_marker(pytest.mark.slow)
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


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[Any] | None:
    """Where slow tests are left out, none is made of what is marked so as a whole: they are as many as the others."""
    marks = getattr(obj, "pytestmark", ())
    slow = isinstance(marks, list) and any(mark.name == "slow" for mark in marks)
    return [] if slow and "not slow" in collector.config.getoption("markexpr").split(" and ") else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made now stands until the end, torch and ten thousand tests among it: Python need not look through it for
    garbage, which takes a quarter of the time, nor later. And torch's loggers hand on what they log, as others do:
    pytest would add its handlers to each of them, six times a test, which is a quarter of what it spends on one."""
    gc.disable()
    faulthandler.dump_traceback_later(2 * LONGEST, file=SAID[0], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
                logger.propagate = True
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors. A quarter of the tests' time nobody computes: a server's patience with its
    clients, or a parent's with a silent child, has to end before it can be looked at."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadgroup` deals tests out, but a class, or a function with all its parameters, at once: a class of a
    suite keeps what its tests share. And in time that does not grow with the square of the tests: xdist counts through
    all that has run whenever a test ends, and looks each up by its name among all. For twenty thousand tests that takes
    a quarter of a minute, and processes wait for it."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class Collected(list[str]):
        def __init__(self, names: Iterable[str]) -> None:
            super().__init__(names)
            self.places = {name: place for place, name in enumerate(self)}

        def index(self, name: str, *_: Any) -> int:
            return self.places[name]

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            names = nodeid.partition("[")[0].split("::")
            return "::".join(names[:2]) if scope == nodeid else scope

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:
                self.registered_collections[node] = Collected(collection)

        def remove_node(self, node: Any) -> str | None:
            """As of its parent, for a process that has ended; but the test that it ended with is not tried again."""
            units = self.assigned_work.pop(node)
            pending = [(unit, name) for unit in units.values() for name, done in unit.items() if not done]
            if not pending:
                return None
            unit, crashed = pending[0]
            unit[crashed] = True
            self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """But not one that still collects, in the place of another that has ended: xdist would fail over it."""
            if node in self.registered_collections:
                super()._reschedule(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            scope = self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that waits for ever says where, ends its process, and has failed: pytest-xdist names it, and has another
    process do the rest. The time between two tests counts as the first one's: the garbage collector may run there."""
    if any(item.get_closest_marker(name) for name in ("slow", "gpu")):
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(LONGEST, file=SAID[0], exit=True)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Here pytest stops the clock, for a debugger: what is torn down may wait, too."""
    if isinstance(node, pytest.Item):
        pytest_runtest_setup(node)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """What one of pytest's processes has started (servers) ends with it, also where it could not see to that."""
    if error is None:
        return
    import psutil

    marks = {
        "PYTEST_XDIST_WORKER": node.workerinput["workerid"],
        "PYTEST_XDIST_TESTRUNUID": node.workerinput["testrunuid"],
    }
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marks.items() <= process.environ().items():
                process.kill()


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
    outputs: grammars warm up only where a test says so. A KV cache whose size is not given is as large as a step leaves
    room for, which half a second of computing finds out: servers have what no test fills. Clients trust one of the
    world's authorities: to read them all, as each does when it is made, takes 28 ms, and nobody here is asked who he
    is."""
    own = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "ENGINE_GRAMMAR_WARM_UP": "false"}
    own["ENGINE_KV_CACHE_MEMORY"] = "1GiB"
    with contextlib.suppress(ImportError):
        import certifi

        end = "-----END CERTIFICATE-----\n"
        one = tmp_path_factory.mktemp("authorities") / "one.pem"
        one.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end, encoding="utf-8")
        own["SSL_CERT_FILE"] = str(one)
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


FIRST_SEEN: dict[str, str] = {}
"""By name of a temporary file of ours: after which test it stood first."""


def strays() -> list[str]:
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(TEMPORARY)]


def pytest_runtest_logfinish(nodeid: str) -> None:
    if tempfile.tempdir is not None:
        for name in strays():
            FIRST_SEEN.setdefault(name, nodeid)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this run and its processes make among the system's temporary files is gone at its end."""
    tmp_path_factory.getbasetemp()  # pytest's own, which it keeps
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield
    deadline = time.monotonic() + 10  # for processes that are about to end
    gc.collect()  # an engine that a test has forgotten ends its processes when it is collected
    while (left := strays()) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [
        f"{name}, which holds {[str(path.relative_to(folder)) for path in Path(folder, name).rglob('*')]}, and stood "
        f"first after {FIRST_SEEN.get(name, 'the last test')}"
        for name in left
    ]
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)
    assert not found, "left among the temporary files: " + "; ".join(found)


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
