"""`engine plugins`: what is installed and what is configured, from metadata alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from engine.embedding import Merged
from engine.plugin.candidate import Candidate
from engine.plugin.card import Command
from engine.plugin.discovery import Registry
from engine.plugin.plugin_list import only
from engine.plugin.points import HOOK_PROCESSES, HOOKS, NONE, POINTS
from engine_kit.flags import add_engine_flags, command_settings


class PluginRow(NamedTuple):
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


class PluginsCommand(Command):
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


def table(registry: Registry, merged: Merged) -> list[PluginRow]:
    """The rows: every point's drivers, then hook plugins and commands.

    Args:
        registry: what is installed.
        merged: what is configured.
    """
    rows: list[PluginRow] = []
    lacks = {p.distribution: p.found.removeprefix("it ") for p in registry.problems if p.kind == "incomplete"}
    for group in (*POINTS, *(f"{HOOKS}.{process}" for process in HOOK_PROCESSES), "commands"):
        point, (choice, origin) = POINTS.get(group), merged.choice(group)
        turned_off = point is not None and point.pick == "recognises" and choice == NONE
        asked = [] if turned_off else _names(choice)
        unasked = f"auto ({origin})" if origin else "auto"
        if point is None:
            unasked = ""
        elif point.optional or turned_off:
            unasked = "off"
        mine: list[tuple[Candidate, str, str]] = []
        for candidate in registry.candidates(group):
            twice = "offered more than once: uninstall one, or deny one" if registry.namesakes(candidate) else ""
            note = "; ".join(filter(None, (twice, lacks.get(candidate.provenance, ""))))
            mine.append((candidate, "" if asked else unasked, note))
        mine += [(c, "", registry.why_outdated(c)) for c in registry.outdated(group)]
        mine += [(c, "denied", registry.denied[c]) for c in only(registry.denied, group)]
        for candidate, mark, note in mine:
            if candidate.name in asked:
                mark = ", ".join(filter(None, (mark, f"asked ({origin})")))
            rows.append(PluginRow(group, candidate.name, candidate.distribution, candidate.version, mark, note))
        missing = [name for name in asked if name not in {candidate.name for candidate, _, _ in mine}]
        rows += [PluginRow(group, name, "", "", f"asked ({origin})", "not installed") for name in missing]
    return rows


def render(rows: Sequence[PluginRow]) -> str:
    """The rows as text, in columns; a point's name stands on its first row."""
    lines: list[tuple[str, ...]] = [("point", "driver", "distribution", "version", "choice")]
    previous = ""
    for row in rows:
        note = row.note if row.choice.startswith("denied") else row.note and f"! {row.note}"
        choice = "; ".join(filter(None, (row.choice, note)))
        lines.append((row.point if row.point != previous else "", row.driver, row.distribution, row.version, choice))
        previous = row.point
    return columns(lines)


def columns(lines: Sequence[tuple[str, ...]]) -> str:
    """Lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _names(choice: str) -> list[str]:
    """The drivers that a choice names: "a", "a,b" or "full=a,sliding=b"; nothing for "auto"."""
    names = [part.rpartition("=")[2].strip() for part in choice.split(",")]
    return [name for name in dict.fromkeys(names) if name not in ("", "auto")]


def _as_json(registry: Registry, merged: Merged, rows: Sequence[PluginRow]) -> dict[str, object]:
    return {
        "drivers": [row._asdict() for row in rows],
        "configured": {point: dict(zip(("choice", "origin"), merged.choice(point), strict=True)) for point in POINTS},
        "options": merged.options(),
        "plugins": {"list": registry.plugins.text, "origin": registry.plugins.origin},
        "problems": [vars(problem) for problem in registry.problems],
    }
