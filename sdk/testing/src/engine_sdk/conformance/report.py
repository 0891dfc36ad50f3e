"""Run a suite against a driver, outside of an author's own tests, and say what came out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_sdk import conformance
from engine_sdk.conformance import SUITES, Conformance
from engine_sdk.conformance.base import NotServed
from engine_sdk.conformance.subject import Subject

CARD_TESTS = frozenset({"test_card_is_light", "test_card_is_sound", "test_card_answers_in_sentences"})
CARD_AND_FORM = CARD_TESTS | {"test_body_has_the_interface", "test_figure"}
"""Tests that say nothing about what the driver computes."""


@dataclass(frozen=True)
class Result:
    """One test.

    Args:
        suite: the class that was run; the file, of a test that is in none.
        test: with its parameters, e.g. "test_decode[float32]".
        outcome: "passed", "skipped" or "failed".
        reason: why it was skipped, or what failed.
        not_served: skipped because the driver itself says that it does not do this; not for lack of anything else.
    """

    suite: str
    test: str
    outcome: str
    reason: str = ""
    not_served: bool = False


@dataclass(frozen=True)
class DriverUnderTest:
    """The driver that a class tests.

    Args:
        point: its point.
        driver: its name.
        options: as the class sets them, but for its `places`.
        device: torch's device string.
        stand_in: what does the device's work in its place, as the class says; "": nothing.
    """

    point: str
    driver: str
    options: Mapping[str, Any]
    device: str
    stand_in: str = ""


@dataclass
class Report:
    """What came out of a run.

    Args:
        results: one for each test, in order.
        tested: who was tested, by the name of the class (`Result.suite`); not those of cards that are not installed.
        figures: the report lines of the suites that ran.
        output: pytest's own words.
    """

    results: list[Result] = field(default_factory=list)
    tested: dict[str, DriverUnderTest] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    output: str = ""

    def of(self, outcome: str) -> list[Result]:
        """The results of one outcome."""
        return [result for result in self.results if result.outcome == outcome]

    @property
    def proved(self) -> bool:
        """Nothing failed, and something that the driver computes was tested."""
        said = [r for r in self.of("passed") if r.test.partition("[")[0] not in CARD_AND_FORM]
        return bool(said) and not self.of("failed")


class _Recorder:
    """Takes down what pytest reports. With `first_only`, a class whose test failed is left at that."""

    def __init__(self, first_only: bool) -> None:
        self.report = Report()
        self._first_only = first_only
        self._failed: set[type | None] = set()
        self._not_served: set[str] = set()

    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        """Skip what is not to be run."""
        if self._first_only and item.cls in self._failed:
            pytest.skip("the class has failed")

    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo[Any]) -> None:
        """Remember the classes that failed, and the tests that a driver does not serve."""
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self._failed.add(item.cls)
        if call.excinfo is not None and call.excinfo.errisinstance(NotServed):
            self._not_served.add(item.nodeid)
        if item.cls is not None and issubclass(item.cls, Conformance) and item.cls.driver:
            cls = item.cls
            options = {name: value for name, value in cls.options.items() if name not in cls.places}
            self.report.tested[cls.__name__] = DriverUnderTest(cls.point, cls.driver, options, cls.device, cls.stand_in)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test's part: an error outside of the test itself is a failure too."""
        if report.when != "call" and report.outcome == "passed":
            return
        above, _, test = report.nodeid.rpartition("::")
        suite = above.rpartition("::")[2]
        said = report.nodeid in self._not_served
        self.report.results.append(Result(suite, test, report.outcome, _reason(report), said))
        self.report.figures += [str(value) for name, value in report.user_properties if name == "figure"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is a failure."""
        if report.failed:
            self.report.results.append(Result(report.nodeid, "(collection)", "failed", report.longreprtext))


def run_file(path: Path, *, first_only: bool = False, select: str = "", only: Sequence[str] = ()) -> Report:
    """Run the suites of a test file in this process.

    Args:
        first_only: leave each class at its first failure.
        select: as pytest's -k.
        only: these tests, as "TestMine::test_decode[float32]"; all where none is named.
    """
    recorder, output = _Recorder(first_only), io.StringIO()
    arguments = [f"{path}::{name}" for name in only] or [str(path)]
    arguments += ["--rootdir", str(path.parent), "-c", os.devnull, "-q", "--import-mode=importlib"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    arguments += ["-k", select] if select else []
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        pytest.main(arguments, plugins=[recorder])
    recorder.report.output = output.getvalue()
    return recorder.report


def run_driver(
    point: str,
    driver: str,
    options: Mapping[str, Any],
    *,
    device: str = "cpu",
    thorough: bool = False,
    select: str = "",
    model: str = "",
    config: str = "",
) -> Report:
    """Run the suite of a point against an installed driver: as the three lines that its author would write.

    Args:
        thorough: with the mixin for long ranges.
        select: as pytest's -k.
        model: for drivers of checkpoints and tokenizers, a model to open.
        config: for models, the path of a config.json.

    Raises ConfigError for a config that is none.
    """
    first, *mixins = SUITES[point]
    asked: type[Conformance] = getattr(conformance, first)
    if config:
        config = str(Path(config).absolute())
        asked = type(first, (asked,), {"config": config})
    suite = asked.suite_for(Subject.installed(point, driver, options))
    bases = [*(mixins if thorough else ()), suite]
    lines = [
        f"from engine_sdk.conformance import {', '.join(bases)}",
        "",
        f"class TestDriver({', '.join(bases)}):",
        f"    driver = {driver!r}",
        f"    options = {dict(options)!r}",
        f"    device = {device!r}",
        *([f"    model = {model!r}"] if model else []),
        *([f"    config = {config!r}"] if config else []),
    ]
    with tempfile.TemporaryDirectory(prefix="engine-conformance-") as folder:
        # Pytest keeps modules by name: a second driver of this process must not be taken for the first.
        path = Path(folder, f"test_{Path(folder).name.replace('-', '_')}.py")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return run_file(path, select=select)


def render(report: Report, title: str) -> str:
    """The report as text: counts, skipped tests by reason, failures, figures."""
    passed, skipped, failed = (report.of(outcome) for outcome in ("passed", "skipped", "failed"))
    lines = [f"{title}: {len(passed)} passed, {len(skipped)} skipped, {len(failed)} failed"]
    for reason, tests in _by_reason(skipped).items():
        shown = ", ".join(tests[:3]) + (f" and {len(tests) - 3} more" if len(tests) > 3 else "")
        lines.append(f"  skipped {len(tests):3d}: {reason}\n               {shown}")
    lines += [f"  FAILED {result.test}: {result.reason}" for result in failed]
    lines += [f"  figure: {line}" for line in report.figures]
    if not failed and not report.proved:
        lines.append("  nothing that the driver computes was tested: it serves none of what the suite asks for")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """The report for programs."""
    results = [vars(result) for result in report.results]
    tested = {suite: vars(tested) for suite, tested in report.tested.items()}
    found = {"proved": report.proved, "tested": tested, "results": results, "figures": report.figures}
    return json.dumps(found, indent=2)


def from_json(text: str) -> Report:
    """What `as_json` wrote, without pytest's own words."""
    found = json.loads(text)
    tested = {suite: DriverUnderTest(**fields) for suite, fields in found["tested"].items()}
    return Report([Result(**fields) for fields in found["results"]], tested, found["figures"])


def _by_reason(results: Sequence[Result]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(result.reason, []).append(result.test)
    return found


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ").removeprefix("NotServed: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return " ".join(line.strip() for line in text.strip().splitlines()[:4])[:300]
