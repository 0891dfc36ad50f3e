"""Writes docs/reference/models.md: runs the suite of point `model` against every model of this repository.

`python docs/generate_models.py` takes some minutes. The suites are run as the packages' own tests have them, as
`generate_matrix.py` runs those of the other points. Exit code 1 where a test fails.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

import generate_matrix
from generate_reference import ROOT, our_drivers

from engine_sdk.conformance.matrix import NO, NOT_RUN, PART, UNTESTED, YES, Cell, Table

PAGE = ROOT / "docs" / "reference" / "models.md"
POINT = "model"
HEAD = """# Models

The architectures that this repository serves, and what each has been shown to do by tiny random checkpoints, as the
[conformance suite](../plugins/prove.md) of point `model` found it: written by `python docs/generate_models.py` from
test results, and from nothing else. `engine serve --model FOLDER` takes the driver of the name in config.json, and
where there is none that of the name `*`, which `transformers` is too: [models of transformers](../users/fallback.md).

**yes**: every test passed. **in part**, **no**: the driver says itself that it does not do it, or a test failed; the
note says which. **untested**: the suite was not run, the note says why.
"""
_DRAFTS = "it drafts for a target, whose features the suite does not give: `{}` holds it to its formula"
DRAFTING: Mapping[str, str] = {
    "DeepSeekMTPModel": "plugins/drafters/tests/test_mtp.py",
    "LlamaForCausalLMEagle": "plugins/drafters/tests/test_models.py",
    "LlamaForCausalLMEagle3": "plugins/drafters/tests/test_models.py",
    "MedusaModel": "plugins/drafters/tests/test_models.py",
    "Qwen3NextMTP": "plugins/drafters/tests/test_qwen_mtp.py",
}
"""Models that drafters work with, and the tests that they have in place of the suite."""


def groups(table: Table) -> dict[str, list[str]]:
    """Column -> the capabilities that it stands for: those of one name and several values together."""
    found: dict[str, list[str]] = {}
    for row in table.rows(POINT):
        name = re.sub(r"(tensor parallel) over \d+ ranks|(computed) in \w+", r"\1\2", row)
        name = {"computed": "computed in float32, bfloat16, float16", "tensor parallel": "2 and 4 ranks"}.get(
            name, name
        )
        found.setdefault(name, []).append(row)
    return found


def render(table: Table) -> str:
    """The page: a row for each model, numbered columns, and the notes."""
    columns, distributions = groups(table), {c.name: c.distribution for c in our_drivers() if c.point == POINT}
    notes: dict[str, int] = {}
    rows = []
    for name in sorted(dict.fromkeys(column.partition(",")[0] for column in table.columns)):
        tested = [column for column in table.columns if column.partition(",")[0] == name]
        cells = [
            _joined([table.cell(row, column) for row in several for column in tested]) for several in columns.values()
        ]
        if name in DRAFTING and all(cell == Cell(UNTESTED, (NOT_RUN,)) for cell in cells):
            cells = [Cell(UNTESTED, (_DRAFTS.format(DRAFTING[name]),))] * len(cells)
        words = [
            " ".join([cell.word, *(f"({notes.setdefault(note, len(notes) + 1)})" for note in cell.notes)])
            for cell in cells
        ]
        rows.append(f"| `{name}` | {distributions[name]} | {' | '.join(words)} |")
    numbers = range(1, len(columns) + 1)
    legend = [f"{number}. {name}" for number, name in zip(numbers, columns, strict=True)]
    head = [f"| architecture | in | {' | '.join(map(str, numbers))} |", "|---" * (len(columns) + 2) + "|"]
    told = [f"- ({number}) {note}" for note, number in notes.items()]
    return "\n".join([HEAD, "Columns:", "", *legend, "", *head, *rows, "", "Notes:", "", *told, ""])


def read(page: str) -> dict[str, list[str]]:
    """By architecture, the words of a page's row."""
    rows = re.findall(r"(?m)^\| `(\w+|\*)` \| [\w-]+ \| (.*) \|$", page)
    return {name: [cell.partition(" (")[0] for cell in cells.split(" | ")] for name, cells in rows}


def _joined(cells: list[Cell]) -> Cell:
    """The least that is said of several; "in part" of what is done in one case and not in another."""
    order, words = [UNTESTED, NO, PART, YES], {cell.word for cell in cells}
    least = PART if words == {NO, YES} else min(words, key=order.index)
    return Cell(least, tuple(dict.fromkeys(note for cell in cells if cell.word != YES for note in cell.notes)))


def main() -> int:
    """Write the page."""
    table = generate_matrix.tables(points=[POINT])[POINT]
    PAGE.write_text(render(table), encoding="utf-8")
    print("\n".join([str(PAGE), *table.failures()]))
    return 1 if table.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
