"""`engine plugins why POINT`: who could do it, who does it, and why the others do not."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from engine.cli.flags import add_engine_flags, add_positional_model, command_settings, name_positional_model
from engine.cli.plugins import columns
from engine.plugin.card import Command
from engine.plugin.discovery import Registry
from engine.plugin.explain import Outcome, explain
from engine.plugin.hints import did_you_mean
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError, EngineError

_WIDTH = 100
"""Characters of the column of reasons, which is the last."""
_KINDS_SHOWN = 6


class WhyCommand(Command):
    """Explain a choice."""

    help = "Explain who serves a point, for the model and the settings given: candidate, verdict, reasons."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("point", metavar="POINT", help="the point, e.g. attention; see `engine plugins`")
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_positional_model(parser)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        point = arguments.point.replace("-", "_")
        if point not in POINTS:
            hint = did_you_mean(point, POINTS) or f"the points are: {', '.join(POINTS)}"
            raise ConfigError(f"explain point '{arguments.point}'", "there is no such point", hint)
        name_positional_model(arguments, "explain a choice for")
        from engine.config.settings import EngineConfig
        from engine.frontend.launch import launch

        merged = command_settings(arguments)
        registry, config = Registry.discover(plugins=merged.plugin_list), EngineConfig.from_merged(merged)
        error: EngineError | None = None
        selections, needs = [], None
        try:
            plan = launch(config, registry)
            selections = [selection for selection in plan.selections if selection.point == point]
            worker, needs = plan.start.worker, plan.idle.get(point)
            subject = f"{point}, for {plan.model_name} in {worker.dtype} on {worker.device}"
        except EngineError as caught:  # the reasons are in it; what can be said of the candidates is said all the same
            error, subject = caught, point
        outcomes = explain(registry, point, selections, needs)
        if getattr(arguments, "json", False):
            print(
                json.dumps({"point": point, "error": error and str(error), "candidates": _as_json(outcomes)}, indent=2)
            )
        else:
            print(subject)
            print(render(outcomes, undecided=error is not None))
        if error is not None:
            raise error
        return 0


def render(outcomes: Sequence[Outcome], undecided: bool = False) -> str:
    """The table, with reasons in lines of a width that can be read. `undecided`: nobody was chosen, for an error."""
    lines: list[tuple[str, ...]] = [("candidate", "distribution", "version", "priority", "verdict", "reasons")]
    for outcome in outcomes:
        c = outcome.candidate
        unknown = undecided and outcome.verdict == "unused"
        verdict, reasons = ("-", ()) if unknown else (outcome.verdict, outcome.reasons)
        text = "; ".join(reasons)
        if outcome.kinds:
            text = f"{_kinds(outcome.kinds)}: {text}"
        first, *more = textwrap.wrap(text, _WIDTH) or [""]
        priority = "" if outcome.priority is None else str(outcome.priority)
        lines.append((c.name, c.distribution, c.version, priority, verdict, first))
        lines += [("", "", "", "", "", line) for line in more]
    return columns(lines)


def _kinds(kinds: Sequence[str]) -> str:
    if len(kinds) <= _KINDS_SHOWN:
        return ", ".join(kinds)
    return f"{', '.join(kinds[:_KINDS_SHOWN])} and {len(kinds) - _KINDS_SHOWN} more"


def _as_json(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    return [
        {
            "driver": outcome.candidate.name,
            "distribution": outcome.candidate.distribution,
            "version": outcome.candidate.version,
            "priority": outcome.priority,
            "verdict": outcome.verdict,
            "kinds": outcome.kinds,
            "reasons": outcome.reasons,
        }
        for outcome in outcomes
    ]
