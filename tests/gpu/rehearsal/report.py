"""What processes of a rehearsal tell the command, and how it is read by people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.rehearsal.counts import readable

MARK = "rehearsal: "
WIDTH = 110


def tell(found: dict[str, Any]) -> None:
    """A line for the command."""
    print(MARK + json.dumps(found), flush=True)


def told(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Those among a process's lines."""
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def findings(log: Path) -> tuple[list[str], list[str]]:
    """Faults and notes that the fake libraries wrote, each once."""
    lines = list(dict.fromkeys(log.read_text().splitlines())) if log.exists() else []
    return [line for line in lines if line.startswith("fault: ")], [line for line in lines if line.startswith("note: ")]


def troubles(found: Sequence[dict[str, Any]]) -> list[str]:
    """What of the told fails the rehearsal."""
    waited = [f"{count} x {name} in decode steps" for row in found for name, count in row.get("waits", {}).items()]
    eager = [f"{row['graphs']:g} graphs a decode step" for row in found if row.get("graphs", 1) < 0.5]
    return waited + eager + [text for row in found for text in row.get("failed", [])]


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Each number of rows: the host's time, and the launches of a step."""
    lines = []
    for row in found:
        if "started" in row:
            lines.append(f"  started in {row['started']} s")
        if "served" in row:
            lines.append(f"  {row['served']}")
        if "launches" not in row:
            continue
        step = "a step with a prompt beside them" if row.get("arrive") else "a decode step"
        lines.append(
            f"  {row['rows']} row{'s' * (row['rows'] > 1)}: {step} takes the host "
            f"{row['milliseconds']} ms (median), {row['graphs']:g} graphs, and launches"
        )
        names = readable(row["launches"])
        lines += [f"    {count:8.2f}  {names[name][:WIDTH]}" for name, count in row["launches"].items()]
    return lines
