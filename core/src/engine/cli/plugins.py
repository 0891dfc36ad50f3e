"""`engine plugins`: what is installed and what is configured, from metadata alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from engine.cli.flags import add_engine_flags, command_settings
from engine.config.sources import Merged
from engine.plugin.card import Command
from engine.plugin.discovery import Registry
from engine.plugin.plugin_list import only
from engine.plugin.points import HOOK_PROCESSES, NONE, PICKS, POINTS


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        point: the point, "hooks.<process>" or "commands".
        driver: the driver's name.
        distribution: who offers it; "" where it is asked for and nobody does.
        version: of that distribution.
        choice: "auto" where the cards decide; "asked" with the place where the driver was named; "" where another is;
            "off" where a point is used only if asked for, and nobody asked; "denied" by the list of plugins.
        note: what is wrong with it, "" where nothing is.
    """

    point: str
    driver: str
    distribution: str
    version: str
    choice: str
    note: str = ""


class Plugins(Command):
    """List what is installed. Nothing of it is imported."""

    help = "List the points, the drivers installed for them, where they come from, and what is configured."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        merged = command_settings(arguments)
        registry = Registry.discover(plugins=merged.plugin_list)
        rows = table(registry, merged)
        if getattr(arguments, "json", False):
            print(json.dumps(_as_json(registry, merged, rows), indent=2))
            return 0
        print(render(rows))
        if registry.denied:
            print(f"\ndenied by {registry.plugins.shown}")
        for problem in registry.problems:
            print(f"\n! {problem.distribution}: {problem.found}\n  to do: {problem.remedy}")
        return 0


def table(registry: Registry, merged: Merged) -> list[Row]:
    """The rows: every point's drivers, then hook plugins and commands.

    Args:
        registry: what is installed.
        merged: what is configured.
    """
    rows: list[Row] = []
    lacks = {p.distribution: p.found.removeprefix("it ") for p in registry.problems if p.kind == "incomplete"}

    for point in POINTS:
        choice, origin = merged.choice(point)
        turned_off = POINTS[point].pick == "recognises" and choice == NONE
        asked = [] if turned_off else _names(choice)
        unasked = "off" if POINTS[point].optional or turned_off else _auto(origin)
        installed = registry.candidates(point)
        names = [candidate.name for candidate in installed]
        unique = not PICKS[POINTS[point].pick].namesakes
        for candidate in installed:
            mark = f"asked ({origin})" if candidate.name in asked else "" if asked else unasked
            twice = "offered more than once: uninstall one, or deny one"
            twice = twice if unique and names.count(candidate.name) > 1 else ""
            note = "; ".join(part for part in (twice, lacks.get(candidate.provenance, "")) if part)
            rows.append(Row(point, candidate.name, candidate.distribution, candidate.version, mark, note))
        outdated = registry.outdated(point)
        for candidate in outdated:
            served = ", ".join(f"v{major}" for major in POINTS[point].majors)
            mark = f"asked ({origin})" if candidate.name in asked else ""
            note = f"speaks v{candidate.major}, this core serves {served}"
            rows.append(Row(point, candidate.name, candidate.distribution, candidate.version, mark, note))
        denied = only(registry.denied, point)
        for candidate in denied:
            mark = f"denied, asked ({origin})" if candidate.name in asked else "denied"
            note = registry.denied[candidate]
            rows.append(Row(point, candidate.name, candidate.distribution, candidate.version, mark, note))
        known = {*names, *(candidate.name for candidate in (*outdated, *denied))}
        rows += [Row(point, name, "", "", f"asked ({origin})", "not installed") for name in asked if name not in known]
    for group in (*(f"hooks.{process}" for process in HOOK_PROCESSES), "commands"):
        rows += [
            Row(group, c.name, c.distribution, c.version, "", lacks.get(c.provenance, ""))
            for c in registry.candidates(group)
        ]
        rows += [
            Row(group, c.name, c.distribution, c.version, "", f"speaks v{c.major}, which this core does not serve")
            for c in registry.outdated(group)
        ]
        rows += [
            Row(group, c.name, c.distribution, c.version, "denied", registry.denied[c])
            for c in only(registry.denied, group)
        ]
    return rows


def render(rows: Sequence[Row]) -> str:
    """The rows as text, in columns; a point's name stands on its first row."""
    head = ("point", "driver", "distribution", "version", "choice")
    lines: list[tuple[str, ...]] = [head]
    previous = ""
    for row in rows:
        note = row.note if row.choice.startswith("denied") else row.note and f"! {row.note}"
        choice = "; ".join(part for part in (row.choice, note) if part)
        lines.append((row.point if row.point != previous else "", row.driver, row.distribution, row.version, choice))
        previous = row.point
    return columns(lines)


def columns(lines: Sequence[tuple[str, ...]]) -> str:
    """Lines of cells as text, each column as wide as its widest cell."""
    head = lines[0]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _auto(origin: str) -> str:
    return f"auto ({origin})" if origin else "auto"


def _names(choice: str) -> list[str]:
    """The drivers that a choice names: "a", "a,b" or "full=a,sliding=b"; nothing for "auto"."""
    names = [part.rpartition("=")[2].strip() for part in choice.split(",")]
    return [name for name in dict.fromkeys(names) if name not in ("", "auto")]


def _as_json(registry: Registry, merged: Merged, rows: Sequence[Row]) -> dict[str, object]:
    configured = {}
    for point in POINTS:
        choice, origin = merged.choice(point)
        configured[point] = {"choice": choice, "origin": origin}
    return {
        "drivers": [row._asdict() for row in rows],
        "configured": configured,
        "options": merged.options(),
        "plugins": {"list": registry.plugins.text, "origin": registry.plugins.origin},
        "problems": [vars(problem) for problem in registry.problems],
    }
