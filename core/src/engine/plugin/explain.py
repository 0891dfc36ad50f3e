"""Selection explains itself: for every candidate of a point whether it is at work, and if not, why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.plugin.card import Card
from engine.plugin.discovery import Candidate, Registry, duplicate
from engine.plugin.plugin_list import only
from engine.plugin.selection_recognised import recognition
from engine.plugin.verdicts import Selection, Verdict, judge, or_quarantine
from engine.types.errors import PluginError


class Outcome(NamedTuple):
    """What came of one candidate.

    Attributes:
        candidate: who.
        priority: of its card; None where that cannot be imported.
        verdict: "chosen", "fits", "unfit", "unused" (none is at work, and nobody was asked), "duplicate" (another
            distribution has the name too), "broken", "outdated" or "denied".
        kinds: the kinds of layer or operations of which this is said; empty where it is said of all.
        reasons: why it is not at work; for a chosen one, why it is, and what its card
            remarks.
    """

    candidate: Candidate
    priority: int | None
    verdict: str
    kinds: tuple[str, ...]
    reasons: tuple[str, ...]


_NONE_AT_WORK = "no driver of this point is at work with these settings"
_ORDER = ("chosen", "fits", "unfit", "unused", "duplicate", "broken", "outdated", "denied")


def explain(
    registry: Registry, point: str, selections: Sequence[Selection], needs: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """What came of every candidate of a point, those at work first; one line for each thing that is said.

    Whom `auto` never came to ask, because one before fitted, is asked here.

    Args:
        registry: what is installed.
        point: the point's name.
        selections: of this point; none where no driver of it is at work.
        needs: by kind, what a driver would be asked that none is at work for; None where it is not known.
    """
    outcomes: list[Outcome] = []
    candidates = registry.candidates(point)
    for candidate in candidates:
        namesakes = [other for other in candidates if other.name == candidate.name]
        if len(namesakes) > 1:
            outcomes.append(Outcome(candidate, None, "duplicate", (), (duplicate(point, namesakes).found,)))
            continue
        try:
            card = registry.card(candidate)
        except PluginError as error:
            outcomes.append(Outcome(candidate, None, "broken", (), (error.found or str(error),)))
            continue
        said: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        if registry.points[point].pick == "in_turn":
            for outcome, kind in _turns(registry, candidate, card, selections):
                said.setdefault(outcome, []).append(kind)
        for selection in () if said else selections:
            said.setdefault(_outcome(registry, candidate, card, selection), []).append(selection.kind)
        if not selections:
            for kind, need in (needs or {}).items():
                said.setdefault(_idle(registry, candidate, card, kind, need), []).append(kind)
            if not needs:
                said["unused", (_NONE_AT_WORK,)] = []
        if any(verdict == "chosen" for verdict, _ in said) and registry.points[point].pick in ("many", "ordered"):
            # What others do says nothing against one that is at work, where several are.
            said = {key: kinds for key, kinds in said.items() if key[0] == "chosen" or any(kinds)}
        for (verdict, reasons), kinds in said.items():
            named = tuple(kind for kind in kinds if kind)
            outcomes.append(Outcome(candidate, card.priority, verdict, named, reasons))
    for candidate in registry.outdated(point):
        served = ", ".join(f"v{major}" for major in registry.points[point].majors)
        reason = f"it speaks v{candidate.major}, this core serves {served}"
        outcomes.append(Outcome(candidate, None, "outdated", (), (reason,)))
    outcomes += [Outcome(c, None, "denied", (), (registry.why_denied(c),)) for c in only(registry.denied, point)]
    return sorted(outcomes, key=lambda o: (_ORDER.index(o.verdict), -(o.priority or 0), o.candidate.name))


def _turns(
    registry: Registry, candidate: Candidate, card: type[Card], selections: Sequence[Selection]
) -> list[tuple[tuple[str, tuple[str, ...]], str]]:
    """((verdict, reasons), kind) of one candidate of pick `in_turn` for each kind of request in which it has a turn;
    kind "" where it has none."""
    found: list[tuple[tuple[str, tuple[str, ...]], str]] = []
    for kind in dict.fromkeys(selection.kind for selection in selections):
        turns = [selection for selection in selections if selection.kind == kind]
        place = next((i for i, selection in enumerate(turns) if selection.candidate == candidate), None)
        if place is None:
            continue
        why = "asked for" if turns[place].asked else f"auto, priority {card.priority}"
        before = _quoted(turns[:place])
        turn = f"gets what {before} {'refuses' if place == 1 else 'refuse'}" if place else "asked first"
        found.append((("chosen", (f"{turn} ({why})", *_remarks(card, turns[place].need))), kind))
    if found or not selections:
        return found
    verdict, reasons = _outcome(registry, candidate, card, selections[0])
    if verdict == "fits":
        reasons = (
            f"{_quoted(selections)} {'was' if len({s.candidate for s in selections}) == 1 else 'were'} asked for",
        )
    return [((verdict, reasons), "")]


def _quoted(selections: Sequence[Selection]) -> str:
    return ", ".join(dict.fromkeys(f"'{selection.candidate.name}'" for selection in selections))


def _outcome(
    registry: Registry, candidate: Candidate, card: type[Card], selection: Selection
) -> tuple[str, tuple[str, ...]]:
    """(verdict, reasons) of one candidate for one choice that was made."""
    pick = registry.points[candidate.point].pick
    if candidate == selection.candidate:
        return "chosen", (_why(selection, pick), *_remarks(card, selection.need))
    if pick == "ordered" and selection.kind and selection.kind not in _names(card, "operations"):
        return "unfit", ("not among what it offers",)
    verdict = next((v for v in selection.verdicts if v.candidate == candidate), None)
    if verdict is None:
        kind, need, model = selection.kind, selection.need, selection.candidate.name
        verdict = or_quarantine(registry, candidate, _verdict, card, candidate, kind, need, pick, model)
    if refused := _refused(registry, verdict):
        return refused
    first = f"'{selection.candidate.name}'"
    if selection.asked:
        return "fits", (f"{first} was asked for",)
    if card.priority == selection.card.priority:
        return "fits", (f"{first} has the same priority and comes first by name",)
    return "fits", (f"{first} has priority {selection.card.priority}",)


def _idle(
    registry: Registry, candidate: Candidate, card: type[Card], kind: str, need: Any
) -> tuple[str, tuple[str, ...]]:
    """(verdict, reasons) of one candidate where no driver of the point is at work."""
    point = registry.points[candidate.point]
    verdict = or_quarantine(registry, candidate, _verdict, card, candidate, kind, need, point.pick)
    how = f"; name one with {point.option_flag}" if point.optional else ""
    return _refused(registry, verdict) or ("fits", (_NONE_AT_WORK + how,))


def _refused(registry: Registry, verdict: Verdict) -> tuple[str, tuple[str, ...]] | None:
    """(verdict, reasons) of one that is broken or does not fit."""
    if (error := registry.quarantine.get(verdict.candidate)) is not None:
        return "broken", (error.found or str(error),)
    return None if verdict.fit else ("unfit", verdict.reasons)


def _remarks(card: type[Card], need: Any) -> tuple[str, ...]:
    """What the card has to say where it serves `need`. That it cannot say it takes nobody's explanation away."""
    try:
        return tuple(str(remark) for remark in card.remarks(need))
    except Exception as error:
        return (f"its card's `remarks` raised {type(error).__name__}: {error}",)


def _verdict(card: type[Card], candidate: Candidate, kind: str, need: Any, pick: str, model: str = "") -> Verdict:
    """What the card says to a need; `model` is the driver of the model's architecture, where the pick is by that."""
    lacks = ""
    if pick == "by_architecture":
        lacks = "it is for another architecture" if candidate.name != model else ""
    elif pick == "claims":
        lacks = "" if card.claims(need) else f"does not claim {need!r}"  # type: ignore[attr-defined]
        return Verdict(candidate, not lacks, (lacks,) if lacks else ())
    elif pick == "recognises":
        return recognition(card, candidate, need)
    elif pick == "per_kind" and kind not in _names(card, "kinds", kind):
        lacks = f"it does not serve layers of kind {kind}"
    if lacks:
        return Verdict(candidate, False, (lacks,))
    return judge(card, candidate, need)


def _names(card: type[Card], attribute: str, *default: str) -> Any:
    return getattr(card, attribute, None) or default


def _why(selection: Selection, pick: str) -> str:
    if selection.asked:
        return "asked for"
    if pick == "by_architecture":
        return "it has the model's architecture"
    if pick == "claims":
        return "it claims the model"
    if pick == "recognises":
        return f"it recognises the model's chat template, priority {selection.card.priority}"
    return f"auto, priority {selection.card.priority}"
