"""`engine plugins doctor`: what is wrong with the installed plugins, and how to mend it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engine.plugin import Candidate, Command, Registry
from engine.plugin.discovery import duplicate
from engine.plugin.points import HOOK_PROCESSES, PICKS, POINTS
from engine_kit.flags import add_plugin_flags, command_settings
from engine_sdk.probe import Finding

SLOW_SECONDS = 2.0
"""A card that takes longer to import is told of: each start, and each `engine plugins why`, waits for it."""
_WIDTH = 110


class Ailment(NamedTuple):
    """Something to mend.

    Attributes:
        kind: "broken", "unmarked", "incomplete", "duplicate", "outdated", "slow" or "heavy".
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
        if group in POINTS and PICKS[POINTS[group].pick].namesakes:
            names = []  # their priorities decide
        for name in sorted({name for name in names if names.count(name) > 1}):
            twice = duplicate(group, [candidate for candidate in candidates if candidate.name == name])
            ailments.append(Ailment("duplicate", f"'{name}' of {group}", twice.found, twice.remedy))
        for candidate in registry.outdated(group):
            other = registry.incompatible(candidate)
            ailments.append(Ailment("outdated", _name(candidate), other.found, other.remedy))
    return ailments


def _of_cards(candidates: Sequence[Candidate], timeout: float) -> dict[Candidate, list[Ailment]]:
    at_once = min(os.cpu_count() or 1, len(candidates)) or 1
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(at_once) as threads:
        probes: queue.SimpleQueue[_Probe] = queue.SimpleQueue()
        for _ in range(at_once):
            probes.put(stack.enter_context(_Probe(timeout)))

        def look(candidate: Candidate) -> Finding:
            one = probes.get()
            try:
                return one.look(candidate)
            finally:
                probes.put(one)

        findings = threads.map(look, candidates)
        return {
            candidate: _diagnose(candidate, finding) for candidate, finding in zip(candidates, findings, strict=True)
        }


class _Probe:
    """A process that imports cards, each in a fork of its own (see `engine_sdk.probe`). No `engine.process.Child`: the
    other side of that has threads, and a process that forks must have none.

    Args:
        timeout: seconds for each card.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def look(self, candidate: Candidate) -> Finding:
        """What is seen of a candidate."""
        c = candidate
        if self._process is None:
            command = [sys.executable, "-m", "engine_sdk.probe", str(self._timeout)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        asked = [c.point, c.name, c.major, c.distribution, c.version, c.value]
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        finding, code, said = json.loads(process.stdout.readline())
        if finding is not None:
            return Finding(*finding)
        remedy = f"report it to its author; until then: pip uninstall {c.distribution}"
        if code is None:
            found = f"importing {c.value} was not done after {self._timeout:g} s"
            return Finding(self._timeout, [], found, remedy)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = said.strip().splitlines()
        found = f"importing {c.value} ended the process ({how})" + (f": {lines[-1]}" if lines else "")
        return Finding(0.0, [], found, remedy)


def _diagnose(candidate: Candidate, finding: Finding) -> list[Ailment]:
    where = _name(candidate)
    if finding.found:
        return [Ailment(finding.kind, where, finding.found, finding.remedy)]
    if finding.heavy and candidate.point in POINTS:
        found = f"its card imports {', '.join(finding.heavy)} ({finding.seconds:.1f} s)"
        return [Ailment("heavy", where, found, "its author has to import them in the body, not with the card")]
    if finding.seconds > SLOW_SECONDS:
        found = f"its card takes {finding.seconds:.1f} s to import"
        return [Ailment("slow", where, found, "its author has to import less with the card")]
    return []
