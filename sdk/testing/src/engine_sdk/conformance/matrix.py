"""What each driver does, by capability: tables of yes, no and untested, made of test results and of nothing else.

`build` takes reports of `run_file` or `run_driver`; `render` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_sdk.conformance.capabilities import CAPABILITIES, FORM, row_of
from engine_sdk.conformance.report import CARD_AND_FORM, DriverUnderTest, Report, Result

YES, PART, NO, UNTESTED = "yes", "in part", "no", "untested"
NOT_RUN = "no suite was run against it"
LONGEST_NOTE = 200


class Cell(NamedTuple):
    """One capability of one driver.

    Attributes:
        word: "yes": every test of it passed. "in part": some passed, and the driver says itself that it does not do
            the others. "no": it says so of all of them, or one failed. "untested": some were not run, for lack of
            something that is not the driver's; or none is there.
        notes: why, unless it is "yes".
    """

    word: str
    notes: tuple[str, ...] = ()


@dataclass
class Table:
    """One point.

    Args:
        columns: drivers, with the options that they were tested with.
        cells: row and column to what was found; a driver that was not tested has none.
    """

    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    def rows(self, point: str) -> list[str]:
        """The capabilities that were tested, in the order of `CAPABILITIES`."""
        found = dict.fromkeys(row for row, _ in self.cells)
        order = [*CAPABILITIES.get(point, ()), FORM]
        last = len(order) - 1

        def place(row: str) -> int:
            return next((i for i, capability in enumerate(order) if capability.names(row)), last - 1)

        return sorted(found, key=place)

    def cell(self, row: str, column: str) -> Cell:
        """What is known."""
        return self.cells.get((row, column), Cell(UNTESTED, (NOT_RUN,)))

    def failures(self) -> list[str]:
        """Notes of what failed."""
        return [f"{c}: {n}" for (_, c), cell in self.cells.items() for n in cell.notes if n.startswith("fails")]


def column_of(tested: DriverUnderTest) -> str:
    """A column's name: the driver, its options, the device where it is not the processor, and what stands in for it."""
    words = [f"{name} {value}" for name, value in tested.options.items()]
    words += [] if tested.device == "cpu" else [f"on {tested.device}"]
    words += [tested.stand_in] if tested.stand_in else []
    return ", ".join([tested.driver, *words])


def build(reports: Iterable[Report], drivers: Mapping[str, Sequence[str]]) -> dict[str, Table]:
    """The tables of all points.

    drivers: by point, the names of those that there are: each has a column, tested or not.
    """
    results: dict[tuple[str, str], list[Result]] = {}
    for report in reports:
        for result in report.results:
            if (tested := report.tested.get(result.suite)) is not None:
                results.setdefault((tested.point, column_of(tested)), []).append(result)
    tables = {point: Table() for point in drivers}
    for point, names in drivers.items():
        of_point = [column for its_point, column in results if its_point == point]
        for name in names:
            columns = [column for column in of_point if column.partition(",")[0] == name]
            tables[point].columns += columns or [name]
            for column in columns:
                for row, cell in _cells(point, results[point, column]).items():
                    tables[point].cells[row, column] = cell
    return tables


def _cells(point: str, results: Sequence[Result]) -> dict[str, Cell]:
    """One driver's column. Where nothing that it computes could be tested, nothing is known of it."""
    by_row: dict[str, list[Result]] = {}
    for result in results:
        row = row_of(point, result.test)
        if row is not None:
            by_row.setdefault(row, []).append(result)
    here = any(r.outcome != "skipped" and r.test.partition("[")[0] not in CARD_AND_FORM for r in results)
    found = {row: verdict(some) for row, some in by_row.items()}
    if not here:
        found = {row: Cell(UNTESTED, cell.notes) if cell.word == NO else cell for row, cell in found.items()}
    return found


def verdict(results: Sequence[Result]) -> Cell:
    """Of the tests of one capability."""
    failed = [r for r in results if r.outcome == "failed"]
    if failed:
        return Cell(NO, tuple(f"fails `{r.test}`: {r.reason}"[:LONGEST_NOTE] for r in failed))
    passed = [r for r in results if r.outcome == "passed"]
    refused = [r for r in results if r.not_served]
    missing = [r for r in results if r.outcome == "skipped" and not r.not_served]
    if missing and not passed:
        return Cell(UNTESTED, _reasons(missing))
    if not passed:
        return Cell(NO, _reasons(refused))
    if missing:
        return Cell(PART, (*_reasons(refused), *(f"untested: {reason}" for reason in _reasons(missing))))
    return Cell(PART, _reasons(refused)) if refused else Cell(YES)


def _reasons(skipped: Sequence[Result]) -> tuple[str, ...]:
    """Each once. They are the driver's own sentences, which say what they are about."""
    return tuple(dict.fromkeys(result.reason for result in skipped))


# -- the page --------------------------------------------------------------------------------------------------------
def render(tables: Mapping[str, Table], head: str) -> str:
    """Markdown: a table for each point, the reasons below it."""
    lines = [head]
    for point, table in tables.items():
        lines += [f"## {point}", ""]
        if not table.cells:
            named = ", ".join(f"`{column}`" for column in table.columns)
            lines += [f"Untested: {named}. {NOT_RUN[0].upper()}{NOT_RUN[1:]}.", ""]
            continue
        numbers: dict[str, int] = {}
        lines += ["| capability | " + " | ".join(f"`{column}`" for column in table.columns) + " |"]
        lines += ["|---|" + "---|" * len(table.columns)]
        for row in table.rows(point):
            words = []
            for column in table.columns:
                cell = table.cell(row, column)
                marks = " ".join(f"({numbers.setdefault(note, len(numbers) + 1)})" for note in cell.notes)
                words.append(f"{cell.word} {marks}".rstrip())
            lines.append(f"| {row} | " + " | ".join(words) + " |")
        lines.append("")
        lines += [f"{number}. {_escaped(note)}" for note, number in numbers.items()]
        lines += [""] if numbers else []
    return "\n".join(lines).rstrip() + "\n"


def read(page: str) -> dict[str, dict[tuple[str, str], str]]:
    """What a page says: by point, row and column to the word; a point without results has none."""
    return {point: {at: cell.word for at, cell in table.cells.items()} for point, table in tables_of(page).items()}


def tables_of(page: str) -> dict[str, Table]:
    """A page's tables, as `render` was given them; of a point without results there are no columns either."""
    found: dict[str, Table] = {}
    for section in page.split("\n## ")[1:]:
        point, *lines = section.splitlines()
        numbered = (line.partition(". ") for line in lines if line[:1].isdigit())
        notes = {number: _unescaped(note) for number, _, note in numbered}
        table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
        columns = [column.strip("` ") for column in table[0][1:]] if table else []
        of_point = found[point.strip()] = Table(columns)
        for row, *cells in table[2:]:
            for column, cell in zip(columns, cells, strict=True):
                word, *marks = cell.split(" (")
                of_point.cells[row, column] = Cell(word, tuple(notes[mark.strip(") ")] for mark in marks))
    return found


def keep(point: str, table: Table, before: Table, note: str) -> None:
    """Put columns of `before` where nothing is known in `table`, of a driver or of one of its columns; marked by a
    note. Capabilities that are not declared any more are left out."""
    declared = (*CAPABILITIES.get(point, ()), FORM)

    def known(of: Table, column: str) -> bool:
        computed = (cell for (row, its), cell in of.cells.items() if its == column and row != FORM.name)
        return any(cell.word != UNTESTED for cell in computed)

    for name in [column for column in table.columns if not any(its == column for _, its in table.cells)]:
        at = table.columns.index(name)
        table.columns[at : at + 1] = [c for c in before.columns if c.partition(",")[0] == name] or [name]
    for column in table.columns:
        if known(before, column) and not known(table, column):
            for (row, its), cell in before.cells.items():
                if its == column and any(one.names(row) for one in declared):
                    table.cells[row, column] = cell._replace(notes=tuple(dict.fromkeys((*cell.notes, note))))


def _escaped(note: str) -> str:
    """No marks of Markdown out of a reason, on one line."""
    return " ".join(note.split()).replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("_", "\\_")


def _unescaped(note: str) -> str:
    return note.replace("\\_", "_").replace("\\[", "[").replace("\\*", "*").replace("&lt;", "<")
