"""What a measurement prints: lines for people, and one flat JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

Figure = float | int | str | bool

_BLOCKS = " ▏▎▍▌▋▊▉█"
_WIDTH = 48


@dataclass
class Report:
    """The result of one measurement.

    Args:
        title: what was measured.
        figures: by name; units are part of the names.
        lines: the table, in order.
        warnings: why the figures may mislead.
    """

    title: str
    figures: dict[str, Figure]
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def row(self, label: str, *cells: str) -> None:
        """Add a line to the table."""
        self.lines.append(f"  {label + ' ':<24}" + "  ".join(f"{cell:<14}" for cell in cells).rstrip())

    def quantiles(self, label: str, name: str, quantiles: Sequence[float]) -> None:
        """Add a line with the percentiles of figure `name`; nothing where nothing was measured."""
        cells = [f"p{q:g} {self.figures[f'{name}_p{q:g}']:.2f}" for q in quantiles if f"{name}_p{q:g}" in self.figures]
        if cells:
            self.row(label, *cells)

    def write(self, out: TextIO, as_json: bool) -> None:
        """Print the table, and with `as_json` the figures as one object on the last line."""
        print(self.title, file=out)
        for line in self.lines:
            print(line, file=out)
        for warning in self.warnings:
            print(f"warning: {warning}", file=out)
        if as_json:
            print(json.dumps({name: _rounded(value) for name, value in self.figures.items()}), file=out)
        out.flush()


def _rounded(value: Figure) -> Figure:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def histogram(values: Sequence[float], rows: int = 10) -> list[str]:
    """A histogram in the terminal: a line for each bin of equal width, and one for the highest 1 % where they lie far
    out. Empty where there are no values.
    """
    if not values:
        return []
    ordered = sorted(values)
    low, cut = ordered[0], ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]
    if cut <= low:
        cut = ordered[-1]
    width = (cut - low) / rows
    if width <= 0:
        return [_bar(f"{low:10.2f}", len(ordered), len(ordered))]
    counts = [0] * (rows + 1)
    for value in ordered:
        counts[rows if value > cut else min(int((value - low) / width), rows - 1)] += 1
    labels = [f"{low + width * i:10.2f} - {low + width * (i + 1):9.2f}" for i in range(rows)]
    labels.append(f"{cut:10.2f} - {ordered[-1]:9.2f}")
    last = rows + 1 if counts[rows] else rows
    return [_bar(label, count, max(counts)) for label, count in zip(labels[:last], counts[:last], strict=True)]


def _bar(label: str, count: int, most: int) -> str:
    eighths = round(8 * _WIDTH * count / most)
    if count and not eighths:
        eighths = 1
    bar = _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8].strip()
    return f"  {label:<24} {bar} {count}"
