"""What the parts of a check tell: rows, one JSON object a line, as soon as each is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "@row "


@dataclass
class Row:
    """One line of the table.

    Args:
        what: was measured.
        result: for people.
        gb_s, tflop_s: reached; None where they say nothing.
        fp8: the machine's figure for products in 8 bits is what `tflop_s` is a share of.
        share: what the bar compares: "gb_s" or "tflop_s", as a share of the machine's, or a name in `figures`.
        figures: anything else, by name.
        bar: the least (or with `at_most` the most) of what `share` names; None for none.
        at_most: the bar is an upper bound.
        unit: of the bar where it is no share.
    """

    what: str
    result: str
    gb_s: float | None = None
    tflop_s: float | None = None
    fp8: bool = False
    share: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    bar: float | None = None
    at_most: bool = False
    unit: str = ""


@dataclass
class Ceilings:
    """What the machine showed: its name and versions, and the figures that shares are of; `fp8_tflop_s` is 0 where it
    multiplies nothing in 8 bits."""

    device: str
    versions: str
    gb_s: float
    tflop_s: float
    fp8_tflop_s: float = 0.0


def tell(row: Row | Ceilings) -> None:
    """Print a row for whoever runs this part."""
    print(MARK + json.dumps({"kind": type(row).__name__, **asdict(row)}), flush=True)
    if isinstance(row, Row):
        print(f"  {row.what}: {row.result}", file=sys.stderr, flush=True)


def told(lines: Iterable[str]) -> tuple[list[Row], Ceilings | None]:
    """The rows in a part's output, and the last ceilings. A line that was cut off is passed over."""
    rows: list[Row] = []
    ceilings: Ceilings | None = None
    for line in lines:
        if not line.startswith(MARK):
            continue
        try:
            fields: dict[str, Any] = json.loads(line.removeprefix(MARK))
            kind = fields.pop("kind")
            if kind == "Ceilings":
                ceilings = Ceilings(**fields)
            else:
                rows.append(Row(**fields))
        except (ValueError, TypeError, KeyError):
            continue
    return rows, ceilings
