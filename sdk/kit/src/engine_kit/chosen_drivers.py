"""Who is at work in an engine, and why: for its banner, its hooks (entry-point group `engine_parts`) and its server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.plugin import Selection
from engine.plugin.candidate import Candidate
from engine.plugin.points import PICKS, POINTS
from engine.types.hooks import ChosenDriver

_LONGEST_REASON = 60


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
