"""Choices explain themselves: who is at work and why, and for every other candidate of a point why it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.plugin.candidate import Candidate
from engine.plugin.card import Card
from engine.plugin.choosing import or_quarantine
from engine.plugin.discovery import Registry, duplicate
from engine.plugin.plugin_list import only
from engine.plugin.points import ANY_ARCHITECTURE, PICKS, POINTS
from engine.plugin.selection import Selection, answer
from engine.types.errors import PluginError
from engine.types.hooks import ChosenDriver

_LONGEST_REASON = 60
_NONE_AT_WORK = "no driver of this point is at work with these settings"
_ORDER = ("chosen", "fits", "unfit", "unused", "duplicate", "broken", "outdated", "denied")

_Said = tuple[str, tuple[str, ...]]
"""(verdict, reasons)."""


# -- who is at work ----------------------------------------------------------------------------------------------------
def by_driver(selections: Iterable[Selection[Any]]) -> list[list[Selection[Any]]]:
    """The selections of each driver at work, in their order: one that serves many kinds or operations is there once."""
    together: dict[Candidate, list[Selection[Any]]] = {}
    for selection in selections:
        together.setdefault(selection.candidate, []).append(selection)
    return list(together.values())


def chosen_drivers(selections: Sequence[Selection[Any]]) -> list[ChosenDriver]:
    """Each driver at work, as hooks are told of it; its kinds where several drivers of the point are at work."""
    drivers = by_driver(selections)
    points = [served[0].point for served in drivers]
    return [
        ChosenDriver(
            point=served[0].point,
            kinds=tuple(dict.fromkeys(s.kind for s in served if s.kind)) if points.count(served[0].point) > 1 else (),
            driver=served[0].candidate.name,
            distribution=served[0].candidate.distribution,
            version=served[0].candidate.version,
            why=why(served),
        )
        for served in drivers
    ]


def why(served: Sequence[Selection[Any]]) -> str:
    """Why a driver is at work, and what speaks against others where the priority decides, e.g. "auto, priority 10;
    unfit: triton: there is no GPU"."""
    first = served[0]
    by_priority = not first.asked and PICKS[POINTS[first.point].pick].question == ""
    others = list(refusals(served).items()) if by_priority else []
    if not others:
        return first.reason
    reasons = [f"{name}: {_short('; '.join(reasons))}" for name, reasons in others[:2]]
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return f"{first.reason}; unfit: {', '.join(reasons)}{more}"


def refusals(served: Sequence[Selection[Any]]) -> dict[str, tuple[str, ...]]:
    """By driver: why others that were asked before a driver at work do not fit."""
    chosen = served[0].candidate
    verdicts = [v for selection in served for v in selection.verdicts if not v.fit and v.candidate != chosen]
    return {c.provenance if c.name == chosen.name else c.name: v.reasons for v in verdicts for c in [v.candidate]}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


# -- every candidate ---------------------------------------------------------------------------------------------------
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
    registry: Registry, point: str, selections: Sequence[Selection[Any]], needs: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """What came of every candidate of a point, those at work first; one line for each thing that is said.

    Whom `auto` never came to ask, because one before fitted, is asked here.

    Args:
        registry: what is installed.
        point: the point's name.
        selections: of this point; none where no driver of it is at work.
        needs: by kind, what a driver would be asked that none is at work for; None where it is not known.
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
        said: dict[_Said, list[str]] = {}
        for kind in dict.fromkeys(mine if selections else needs or ()):
            turns = [selection for selection in selections if kind in (selection.kind, "")]
            asks = {s.kind: s.need for s in turns} if needs is None or turns else {kind: needs[kind]}
            said.setdefault(_said(registry, candidate, card, turns, asks), []).append(kind)
        for (verdict, reasons), kinds in (said or {("unused", (_NONE_AT_WORK,)): []}).items():
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
