"""`engine plugins doctor`: what is wrong with the installed plugins, and how to mend it."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engine.cli.flags import add_plugin_flags, command_settings
from engine.frontend.plugin_record import PluginRecord, key
from engine.plugin.command import Command
from engine.plugin.discovery import Candidate, Registry, duplicate
from engine.plugin.points import HOOK_PROCESSES, POINTS
from engine.plugin.probe import Finding

SLOW_SECONDS = 2.0
"""A card that takes longer to import is told of: each start, and each `engine plugins why`, waits for it."""
_WIDTH = 110


class Ailment(NamedTuple):
    """Something to mend.

    Attributes:
        kind: "broken", "incomplete", "duplicate", "outdated", "slow" or "heavy".
        where: the plugin, or the distribution.
        found: what is wrong.
        remedy: what mends it.
    """

    kind: str
    where: str
    found: str
    remedy: str


class Denied(NamedTuple):
    """A plugin that was not looked at, because the list of plugins denies it."""

    where: str
    reason: str


class Doctor(Command):
    """Look at everything that is installed."""

    help = "Import each installed plugin's card in a process of its own, and tell what is wrong and how to mend it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--timeout", type=_seconds, default=10.0, metavar="SECONDS", help="for each card (default: 10)"
        )
        parser.add_argument("--json", action="store_true", default=False, help="print JSON")
        add_plugin_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        registry = Registry.discover(plugins=command_settings(arguments).plugin_list)
        candidates = [candidate for group in _groups() for candidate in registry.candidates(group)]
        found = _of_cards(candidates, arguments.timeout)
        _record(found)
        ailments = [*_of_metadata(registry), *(ailment for several in found.values() for ailment in several)]
        if arguments.json:
            denied = [c._asdict() for c in _denied(registry)]
            told = {"looked_at": len(candidates), "ailments": [a._asdict() for a in ailments], "denied": denied}
            print(json.dumps(told, indent=2))
        else:
            print(render(candidates, ailments, _denied(registry), registry.plugins.shown))
        return 1 if ailments else 0


def render(
    candidates: Sequence[Candidate], ailments: Sequence[Ailment], denied: Sequence[Denied] = (), shown: str = ""
) -> str:
    """What was looked at, each ailment with its remedy, and what was not looked at."""
    distributions = len({candidate.distribution for candidate in candidates})
    lines = [
        f"{len(candidates)} plugins of {distributions} distributions: "
        + (f"{len(ailments)} to mend" if ailments else "all are sound")
    ]
    for ailment in ailments:
        head = f"{ailment.kind}: {ailment.where}"
        lines += ["", head, *_wrapped("found", ailment.found), *_wrapped("to do", ailment.remedy)]
    if denied:
        lines += ["", f"denied, and not looked at ({shown}):"]
        lines += [f"  {where}: {reason}" for where, reason in denied]
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * (len(label) + 4)
    return textwrap.wrap(f"  {label}: {text}", _WIDTH, subsequent_indent=indent) if text else []


def _groups() -> tuple[str, ...]:
    return (*POINTS, *(f"hooks.{process}" for process in HOOK_PROCESSES), "commands")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def _name(candidate: Candidate) -> str:
    return f"'{candidate.name}' of {candidate.point} ({candidate.provenance})"


def _denied(registry: Registry) -> list[Denied]:
    ordered = sorted(registry.denied, key=lambda c: (_groups().index(c.point), c.name, c.distribution))
    return [Denied(_name(candidate), registry.denied[candidate]) for candidate in ordered]


def _of_metadata(registry: Registry) -> list[Ailment]:
    ailments = [Ailment(p.kind, p.distribution, p.found, p.remedy) for p in registry.problems]
    for group in _groups():
        candidates = registry.candidates(group)
        names = [candidate.name for candidate in candidates]
        for name in sorted({name for name in names if names.count(name) > 1}):
            twice = duplicate(group, [candidate for candidate in candidates if candidate.name == name])
            ailments.append(Ailment("duplicate", f"'{name}' of {group}", twice.found, twice.remedy))
        for candidate in registry.outdated(group):
            other = registry.incompatible(candidate)
            ailments.append(Ailment("outdated", _name(candidate), other.found, other.remedy))
    return ailments


def _of_cards(candidates: Sequence[Candidate], timeout: float) -> dict[Candidate, list[Ailment]]:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        findings = pool.map(lambda candidate: _probe(candidate, timeout), candidates)
        return {
            candidate: _diagnose(candidate, finding) for candidate, finding in zip(candidates, findings, strict=True)
        }


def _record(found: Mapping[Candidate, Sequence[Ailment]]) -> None:
    """For `engine plugins`, which imports nothing itself."""
    broken = {key(c): (a.found, a.remedy) for c, several in found.items() for a in several if a.kind == "broken"}
    PluginRecord().write(broken, map(key, found), "engine plugins doctor")


def _probe(candidate: Candidate, timeout: float) -> Finding:
    c = candidate
    command = [sys.executable, "-m", "engine.plugin.probe", c.point, c.name, str(c.major), c.value, c.distribution]
    remedy = f"report it to its author; until then: pip uninstall {c.distribution}"
    try:
        ended = subprocess.run([*command, c.version], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Finding(timeout, [], f"importing {c.value} was not done after {timeout:g} s", remedy)
    try:
        return Finding(*json.loads(ended.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        said = ended.stderr.strip().splitlines()
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
        found = f"importing {c.value} ended the process ({how})" + (f": {said[-1]}" if said else "")
        return Finding(0.0, [], found, remedy)


def _diagnose(candidate: Candidate, finding: Finding) -> list[Ailment]:
    where = _name(candidate)
    if finding.found:
        return [Ailment("broken", where, finding.found, finding.remedy)]
    if finding.heavy and candidate.point in POINTS:
        found = f"its card imports {', '.join(finding.heavy)} ({finding.seconds:.1f} s)"
        return [Ailment("heavy", where, found, "its author has to import them in the body, not with the card")]
    if finding.seconds > SLOW_SECONDS:
        found = f"its card takes {finding.seconds:.1f} s to import"
        return [Ailment("slow", where, found, "its author has to import less with the card")]
    return []
