"""The table: what was measured, beside what the machine can do, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.gpu.rows import Ceilings, Row
from tests.gpu.sheets import sheet_of, why_void

HEAD = ("what", "result", "GB/s", "TFLOP/s", "bar", "met")


class Part(NamedTuple):
    """What became of a part of the check.

    Args:
        name: for people.
        seconds: that it took.
        trouble: why it says less than it should; empty for none.
        summary: its own last words, e.g. "212 passed, 3 skipped".
        failed: whether the check has failed by it.
    """

    name: str
    seconds: float
    trouble: str = ""
    summary: str = ""
    failed: bool = False


def page(rows: Sequence[Row], ceilings: Ceilings | None, parts: Sequence[Part], day: str, commit: str) -> str:
    """All of it. Where there are no ceilings, or void ones, no share is given and no bar is met or missed."""
    lines = [f"### {ceilings.device if ceilings else 'no GPU'}, {day}, {commit}", ""]
    void = ["nothing was measured"] if ceilings is None else why_void(ceilings.device, ceilings.gb_s, ceilings.tflop_s)
    if ceilings is not None:
        sheet = sheet_of(ceilings.device)
        sheets = "" if sheet is None or sheet.fp8_tflop_s is None else f", in fp8 {sheet.fp8_tflop_s:,.0f}"
        promised = (
            "" if sheet is None else f" (data sheet: {sheet.gb_s:,.0f} GB/s, {sheet.tflop_s:,.0f}{sheets} TFLOP/s)"
        )
        eighths = f", {ceilings.fp8_tflop_s:,.0f} of one in fp8" if ceilings.fp8_tflop_s else ""
        lines += [
            f"{ceilings.versions}. Measured in this run: {ceilings.gb_s:,.0f} GB/s read, "
            f"{ceilings.tflop_s:,.0f} TFLOP/s of a bf16 matrix product{eighths}{promised}.",
            "",
        ]
        lines += [f"**Void**: {reason}." for reason in void] + [""] * bool(void)
    if rows:
        lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        lines += ["| " + " | ".join(cells(row, None if void else ceilings)) + " |" for row in rows]
        lines.append("")
    lines += ["| part | seconds | |", "|---|---|---|"]
    for part in parts:
        said = "; ".join(text for text in (part.summary, part.trouble) if text)
        lines.append(f"| {part.name} | {part.seconds:.0f} | {said.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def cells(row: Row, ceilings: Ceilings | None) -> tuple[str, ...]:
    """A row's columns; without ceilings shares and verdicts on them are left out."""
    found = value(row, ceilings)
    relative = row.share in ("gb_s", "tflop_s")
    bar = "" if row.bar is None else f"{'at most' if row.at_most else 'at least'} {shown(row.bar, row.unit)}"
    met = ""
    if row.bar is not None:
        if found is None:
            met = "void" if relative or row.share not in row.figures else ""
        else:
            met = "yes" if (found <= row.bar if row.at_most else found >= row.bar) else "no"
            met += f" ({shown(found, row.unit)})"
    return (
        row.what,
        row.result,
        reached(row.gb_s, most_of(row, "gb_s", ceilings)),
        reached(row.tflop_s, most_of(row, "tflop_s", ceilings)),
        bar,
        met,
    )


def value(row: Row, ceilings: Ceilings | None) -> float | None:
    """What the bar compares; None where it cannot be known."""
    if row.share in row.figures:
        return row.figures[row.share]
    if ceilings is None or row.share not in ("gb_s", "tflop_s"):
        return None
    measured, most = getattr(row, row.share), most_of(row, row.share, ceilings)
    return None if measured is None or most is None else measured / most


def most_of(row: Row, share: str, ceilings: Ceilings | None) -> float | None:
    """What the machine can do of "gb_s" or "tflop_s", as the row computes; None where it was not measured."""
    most: float = (
        0.0 if ceilings is None else getattr(ceilings, "fp8_tflop_s" if row.fp8 and share == "tflop_s" else share)
    )
    return most or None


def reached(figure: float | None, most: float | None) -> str:
    """ "2,840 (85 %)", or without a ceiling the figure alone."""
    if figure is None:
        return ""
    return f"{figure:,.0f}" if most is None else f"{figure:,.0f} ({figure / most:.0%})"


def shown(figure: float, unit: str) -> str:
    """A share as per cent, anything else with its unit."""
    if not unit:
        return f"{figure:.1%}"
    return f"{figure:,.0f} {unit}" if figure >= 1000 else f"{figure:.3g} {unit}"
