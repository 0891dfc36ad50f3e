"""Writes docs/reference/capabilities.md: runs the conformance suites against every driver of this repository
but models.

`python docs/generate_matrix.py` takes ten minutes or so; `python docs/generate_matrix.py router evictor` runs the
suites of these points alone, and leaves the others' tables as they are. The suites are run as the packages' own tests
have them, so drivers are tested with the options and models that stand there. Where a driver cannot be tested here, for
want of its library or a GPU, its column stays as the page had it, with a note. Exit code 1 where a test fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from generate_reference import ROOT, our_drivers

from engine.plugin import POINTS
from engine_sdk.conformance import SUITES
from engine_sdk.conformance.matrix import Table, build, keep, render, tables_of
from engine_sdk.conformance.report import Report, as_json, from_json, run_file

PAGE = ROOT / "docs" / "reference" / "capabilities.md"
HEAD = """# Drivers by capability

What each driver of this repository does, as the [conformance suites](../plugins/prove.md) found it: written by
`python docs/generate_matrix.py` from test results, and from nothing else. A test regenerates it and compares.

- **yes**: every test of the capability passed.
- **in part**: some passed; of the others the driver says itself that it does not do them, and the note says which.
- **no**: the driver says so, on its card or where it refuses by name; or a test failed, which the note then says.
- **untested**: nothing was run, for lack of hardware or of a suite. It may work.

[Models](models.md) have a page of their own. A driver that was tested with several options has a column for each.
`interpreted`: a GPU's kernels were run by Triton's
interpreter, on the processor; what they do on a GPU has a column of its own, `on cuda`.

`engine plugins test POINT DRIVER` runs the same suites on your machine, against any installed driver.
"""
SUITE_CLASS = r"(?m)^(?:class Test\w+\(| +.*= type\().*\b({})\b"
OTHERS = [point for point in POINTS if point != "model"]
"""The points of this page: models have one of their own, by `generate_models.py`."""
KEPT = "from an earlier run: what it needs was not there when the others were run last"
LONG = "Thorough"
"""In the names of classes that run for minutes: what they prove, shorter ones have proved in smaller ranges."""


def suite_files(points: Collection[str] = tuple(SUITES)) -> list[Path]:
    """The packages' tests that hold suites of these points."""
    places = [ROOT / "core", *sorted((ROOT / "plugins").iterdir()), *sorted((ROOT / "contrib").iterdir())]
    files = [path for place in places for path in sorted((place / "tests").rglob("test_*.py"))]
    wanted = re.compile(SUITE_CLASS.format("|".join(SUITES[point][0] for point in points if point in SUITES) or "(?!)"))
    return [path for path in files if wanted.search(path.read_text(encoding="utf-8"))]


def drivers() -> dict[str, list[str]]:
    """The drivers of this repository, by point."""
    ours = sorted(our_drivers(), key=lambda c: (c.distribution != "engine", c.distribution, c.name))
    found = [(c.point, c.name) for c in ours]
    return {point: [name for its_point, name in found if its_point == point] for point in POINTS}


def tables(jobs: int = 1, points: Collection[str] = tuple(OTHERS)) -> dict[str, Table]:
    """Run the suites of these points, each file in a process of its own. Raises SystemExit for a file that is not
    read: what it would have tested must not be taken for untested."""
    with ThreadPoolExecutor(jobs) as pool:
        reports = list(pool.map(_run, suite_files(points)))
    unread = [result for report in reports for result in report.of("failed") if result.suite not in report.tested]
    if unread:
        raise SystemExit("\n".join(f"{result.suite}: {result.reason}" for result in unread))
    return build(reports, {point: names for point, names in drivers().items() if point in points})


def sections(page: str) -> dict[str, str]:
    """A page's text by point."""
    return {section.partition("\n")[0]: f"## {section.rstrip()}\n" for section in page.split("\n## ")[1:]}


def _run(path: Path) -> Report:
    start = time.monotonic()
    command = [sys.executable, __file__, "--file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = from_json(done.stdout)
    counts = ", ".join(f"{len(report.of(outcome))} {outcome}" for outcome in ("passed", "skipped", "failed"))
    print(f"{path.relative_to(ROOT)}: {counts}, {time.monotonic() - start:.0f} s", flush=True)
    return report


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", nargs="*", metavar="POINT", help="these alone (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="files that are run side by side (default: 1)")
    parser.add_argument("--file", type=Path, help="run this one alone, and print its report as JSON")
    given = parser.parse_args()
    if given.file is not None:
        print(as_json(run_file(given.file, select=f"not {LONG}")))
        return 0
    if unknown := set(given.points) - set(OTHERS):
        parser.error(f"there is no point {', '.join(sorted(unknown))} on this page")
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    made, before = sections(page), tables_of(page)
    found = tables(given.jobs, [p for p in OTHERS if not given.points or p in given.points or p not in made])
    for point in found.keys() & before.keys():
        keep(point, found[point], before[point], KEPT)
    made |= sections("\n" + render(found, ""))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join([HEAD, *(made[point] for point in OTHERS)]), encoding="utf-8")
    failures = [f"{point} {failure}" for point, table in found.items() for failure in table.failures()]
    print("\n".join([str(PAGE), *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
