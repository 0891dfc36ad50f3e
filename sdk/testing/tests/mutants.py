"""The table of mutants in the documentation: `python sdk/testing/tests/mutants.py` runs each suite against each mutant.

Each `mutants_<point>.py` beside this file holds drivers with one planted fault each, and a test class for each. The
page says which test of the suite caught it; `test_mutants.py` runs just those tests, and all of them when it is slow.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "plugins" / "mutants.md"
HEAD = """# Mutants

A suite is worth what it catches. For each suite of [the conformance kit](prove.md) there are drivers with one planted
fault each, in `sdk/testing/tests/`; the suite is run against every one of them, and stops at the first test that fails.
This page is written by `python sdk/testing/tests/mutants.py`, and a test keeps it true.
"""
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| `(.+)` \|$", re.MULTILINE)


def points() -> list[str]:
    """The points that have mutants, in the order of the kit."""
    from engine_sdk.conformance import SUITES

    return [point for point in SUITES if path_of(point).exists()]


def path_of(point: str) -> Path:
    """The file with a point's mutants."""
    return HERE / f"mutants_{point}.py"


def faults(point: str) -> dict[str, str]:
    """Each mutant's name and planted fault."""
    return {mutant.__name__: mutant.__doc__ for mutant in importlib.import_module(f"mutants_{point}").MUTANTS}


def caught(point: str) -> dict[str, str]:
    """Each mutant's name, and the first test of the whole suite that fails on it; none for one that survives."""
    from engine_sdk.conformance.report import run_file

    report = run_file(path_of(point), first_only=True)
    return {result.suite.removeprefix("Test"): result.test for result in report.of("failed")}


def page() -> dict[str, dict[str, tuple[str, str]]]:
    """What the page says: by point and mutant, the fault and the test."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {s.split("\n")[0].strip(): {m[1]: (m[2], m[3]) for m in ROW.finditer(s)} for s in sections}


def render(found: dict[str, dict[str, str]]) -> str:
    """The page."""
    lines = [HEAD, "| suite | mutants | caught |", "|---|---|---|"]
    for point, tests in found.items():
        known = faults(point)
        lines.append(f"| [{point}](#{point}) | {len(known)} | {len(known.keys() & tests.keys())} |")
    for point, tests in found.items():
        lines += ["", f"## {point}", "", "| mutant | planted fault | caught by |", "|---|---|---|"]
        lines += [f"| `{name}` | {fault} | `{tests[name]}` |" for name, fault in faults(point).items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page; points named on the command line are run, the others keep what the page says."""
    importlib.import_module("conftest")  # beside this file: makes the drivers importable
    named = sys.argv[1:] or points()
    found = {}
    for point in points():
        known = {name: test for name, (_, test) in page().get(point, {}).items()} if PAGE.exists() else {}
        found[point] = caught(point) if point in named else known
        survivors = sorted(faults(point).keys() - found[point].keys())
        print(f"{point}: {len(found[point])} caught" + (f", SURVIVORS: {', '.join(survivors)}" if survivors else ""))
        if survivors:
            return 1
    PAGE.write_text(render(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
