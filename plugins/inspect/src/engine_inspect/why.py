"""`engine plugins why POINT`: who could do it, who does it, and why the others do not."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.plugin import Candidate, Card, Command, Registry, Selection
from engine.plugin.choosing import or_quarantine
from engine.plugin.discovery import duplicate
from engine.plugin.hints import did_you_mean
from engine.plugin.plugin_list import only
from engine.plugin.points import ANY_ARCHITECTURE, PICKS, PLATFORM, POINTS
from engine.plugin.selection import answer
from engine.types.errors import ConfigError, EngineError, PluginError
from engine_inspect.plugins import columns
from engine_kit.flags import add_engine_flags, add_positional_model, command_settings, name_positional_model

_WIDTH = 100
"""Characters of the column of reasons, which is the last."""
_KINDS_SHOWN = 6
_NONE_AT_WORK = "no driver of this point is at work with these settings"
_ORDER = ("chosen", "fits", "unfit", "unused", "duplicate", "broken", "outdated", "denied")

_Said = tuple[str, tuple[str, ...]]
"""(verdict, reasons)."""


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
        from engine.embedding import EngineConfig, launch

        merged = command_settings(arguments)
        registry, config = Registry.discover(plugins=merged.plugin_list), EngineConfig.from_merged(merged)
        error: EngineError | None = None
        selections, needs, unused = [], None, _NONE_AT_WORK
        try:
            plan = launch(config, registry)
            selections = [selection for selection in plan.selections if selection.point == point]
            worker, needs = plan.start.worker, plan.idle.get(point)
            platform = plan.one(PLATFORM)
            if platform is not None and point in platform.card.own_points:
                unused = f"the worker of platform '{platform.candidate.name}' brings its own"
            subject = f"{point}, for {plan.model_name} in {worker.dtype} on {worker.device}"
        except EngineError as caught:  # the reasons are in it; what can be said of the candidates is said all the same
            error, subject = caught, point
        outcomes = explain(registry, point, selections, needs, unused)
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


class Outcome(NamedTuple):
    """What came of one candidate.

    Attributes:
        candidate: who.
        priority: of its card; None where that cannot be imported.
        verdict: "chosen", "fits", "unfit", "unused" (none is at work, and nobody was asked), "duplicate" (another
            distribution has the name too), "broken", "outdated" or "denied".
        kinds: the kinds of layer or operations of which this is said; empty where it is said of all.
        reasons: why it is not at work; for a chosen one, why it is, and what its card remarks.
    """

    candidate: Candidate
    priority: int | None
    verdict: str
    kinds: tuple[str, ...]
    reasons: tuple[str, ...]


def explain(
    registry: Registry,
    point: str,
    selections: Sequence[Selection[Any]],
    needs: Mapping[str, Any] | None = None,
    unused: str = _NONE_AT_WORK,
) -> list[Outcome]:
    """What came of every candidate of a point, those at work first; one line for each thing that is said.

    Whom `auto` never came to ask, because one before fitted, is asked here.

    Args:
        registry: what is installed.
        point: the point's name.
        selections: of this point; none where no driver of it is at work.
        needs: by kind, what a driver would be asked that none is at work for; None where it is not known.
        unused: why nobody was asked, where nobody was.
    """
    pick = registry.points[point].pick
    outcomes: list[Outcome] = []
    for candidate in registry.candidates(point):
        if namesakes := registry.namesakes(candidate):
            outcomes.append(Outcome(candidate, None, "duplicate", (), (duplicate(point, namesakes).found,)))
            continue
        try:
            card = registry.card(candidate)
        except PluginError as error:
            outcomes.append(Outcome(candidate, None, "broken", (), (error.found or str(error),)))
            continue
        # In turn, each has kinds of its own; who has no turn is compared with everybody.
        mine = [s.kind for s in selections if pick != "in_turn" or s.candidate == candidate] or [""]
        asked = list(dict.fromkeys(mine if selections else needs or ()))
        said: dict[_Said, list[str]] = {}
        # Of what it serves, if anything: that it does not serve other kinds too is no reason for anything.
        for kind in PICKS[pick].served(card, asked) or asked:
            turns = [selection for selection in selections if kind in (selection.kind, "")]
            asks = {s.kind: s.need for s in turns} if needs is None or turns else {kind: needs[kind]}
            said.setdefault(_said(registry, candidate, card, turns, asks), []).append(kind)
        for (verdict, reasons), kinds in (said or {("unused", (unused,)): []}).items():
            outcomes.append(Outcome(candidate, card.priority, verdict, tuple(filter(None, kinds)), reasons))
    for candidate in registry.outdated(point):
        outcomes.append(Outcome(candidate, None, "outdated", (), (f"it {registry.why_outdated(candidate)}",)))
    outcomes += [Outcome(c, None, "denied", (), (registry.why_denied(c),)) for c in only(registry.denied, point)]
    return sorted(outcomes, key=lambda o: (_ORDER.index(o.verdict), -(o.priority or 0), o.candidate.name))


def _said(
    registry: Registry,
    candidate: Candidate,
    card: type[Card],
    turns: Sequence[Selection[Any]],
    asks: Mapping[str, Any],
) -> _Said:
    """What is said of one candidate.

    Args:
        turns: the drivers at work, in the order of their turns.
        asks: what they were asked, or would be.
    """
    point = registry.points[candidate.point]
    for place, selection in enumerate(turns):
        if selection.candidate == candidate:
            reason = selection.reason
            if point.pick == "in_turn":
                before = _names(turns[:place]) + (" refuses" if place == 1 else " refuse")
                reason = f"gets what {before} ({reason})" if place else f"asked first ({reason})"
            return "chosen", (reason, *_remarks(card, selection.need))
    by_architecture = turns and point.pick == "by_architecture"
    if by_architecture and _is_alias(candidate, turns[0].candidate):
        return "fits", (f"it is '{turns[0].candidate.name}' by another name",)
    if by_architecture and candidate.name not in (turns[0].need.architecture, ANY_ARCHITECTURE):
        return "unfit", ("it is for another architecture",)
    if turns and point.pick in ("ordered", "per_kind") and not PICKS[point.pick].served(card, asks):
        return "unfit", ("not among what it serves",)
    verdict = next((v for selection in turns for v in selection.verdicts if v.candidate == candidate), None)
    if verdict is None:
        verdict = or_quarantine(registry, candidate, lambda: answer(PICKS[point.pick], card, candidate, asks))
    if (error := registry.quarantine.get(candidate)) is not None:
        return "broken", (error.found or str(error),)
    if not verdict.fit:
        return "unfit", verdict.reasons
    if not turns:
        return "fits", (_NONE_AT_WORK + (f"; name one with {point.option_flag}" if point.optional else ""),)
    return "fits", (_why_before(turns, candidate, card),)


def _is_alias(candidate: Candidate, chosen: Candidate) -> bool:
    """Whether both are one driver for any architecture, which has a second name to be asked for by."""
    same = (candidate.distribution, candidate.value) == (chosen.distribution, chosen.value)
    return same and ANY_ARCHITECTURE in (candidate.name, chosen.name)


def _why_before(turns: Sequence[Selection[Any]], candidate: Candidate, card: type[Card]) -> str:
    """Why others are at work and not this one, which would fit."""
    first = turns[0]
    who = _names(turns if POINTS[first.point].pick == "in_turn" else [first])
    if first.asked or "," in who:
        return f"{who} {'were' if ',' in who else 'was'} asked for"
    if candidate.name == ANY_ARCHITECTURE != first.candidate.name:
        return f"{who} is for this architecture alone, and comes before"
    if candidate.name == first.candidate.name:
        return f"that of {first.candidate.provenance} has priority {first.card.priority}"
    if card.priority == first.card.priority:
        return f"{who} has the same priority and comes first by name"
    return f"{who} has priority {first.card.priority}"


def _names(selections: Sequence[Selection[Any]]) -> str:
    return ", ".join(dict.fromkeys(f"'{selection.candidate.name}'" for selection in selections))


def _remarks(card: type[Card], need: Any) -> tuple[str, ...]:
    """What the card has to say where it serves `need`, or all needs of a tuple. That it cannot say it takes nobody's
    explanation away."""
    try:
        needs = need if isinstance(need, tuple) else (need,)
        return tuple(dict.fromkeys(str(remark) for each in needs for remark in card.remarks(each)))
    except Exception as error:
        return (f"its card's `remarks` raised {type(error).__name__}: {error}",)


# -- as text and as data ----------------------------------------------------------------------------------------------
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
