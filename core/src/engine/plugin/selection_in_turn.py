"""Choosing drivers that are asked in turn: each request goes to the first, by its kind, that takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.options import validate_options
from engine.plugin.verdicts import Selection, Verdict, consider, judge, none_fits, ranked, unfit
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.plugin.card import Card

AUTO = "auto"


def select_in_turn(
    registry: Registry,
    point: str,
    need: Any,
    kinds: Collection[str],
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Selection]:
    """Choose, for each kind of request, the drivers that are asked whether they take one, and in which order.

    A card says in `constraints` which kinds it serves. Where names are given, nobody else is asked, unless "auto"
    stands among them: then the others follow, by priority.

    Args:
        registry: what is installed.
        point: the point's name.
        need: what the engine asks of each driver.
        kinds: all that there are.
        asked: names separated by commas; None or "auto" leaves all to the cards.
        options: the options given for this point; each chosen driver gets those that it knows.

    Returns:
        One selection for each kind and driver that serves it (`Selection.kind`): kind by kind, in the order of turns.
        A kind that nobody serves has none, and what asks for it is refused.

    Raises:
        ConfigError: a name is asked for twice.
        PluginError: an asked driver does not fit, or serves no kind; no driver serves any, with everybody's reasons; or
            as `select`.
    """
    names = [name.strip() for name in (asked or AUTO).split(",") if name.strip()] or [AUTO]
    if len(set(names)) < len(names):
        flag = registry.points[point].option_flag
        raise ConfigError(f"{flag}={asked}", "a name stands there twice", "name each once")
    order: list[tuple[Candidate, type[Card]]] = []
    verdicts: list[Verdict] = []
    named = [registry.find(point, name) for name in names if name != AUTO]
    for candidate in named:
        card = registry.card(candidate)
        verdict = _verdict(card, candidate, need, kinds)
        if not verdict.fit:
            raise unfit(registry, verdict)
        order.append((candidate, card))
        verdicts.append(verdict)
    if AUTO in names:
        cards, broken = ranked(registry, point)
        for candidate, card in cards:
            if candidate in named:
                continue
            verdict = consider(registry, candidate, _verdict, card, candidate, need, kinds)
            verdicts.append(verdict)
            if verdict.fit:
                order.append((candidate, card))
        verdicts += broken
    if not order:
        raise none_fits(registry, point, "", verdicts)
    validated = validate_options(point, order, options)
    said = tuple(verdicts)
    return [
        Selection(point, kind, candidate, card, validated[candidate], candidate in named, said, need)
        for kind in kinds
        for candidate, card in order
        if kind in served(card)
    ]


def served(card: type[Card]) -> Collection[str]:
    """The kinds of request that a card serves."""
    kinds: Collection[str] = getattr(card, "constraints", frozenset())
    return kinds


def _verdict(card: type[Card], candidate: Candidate, need: Any, kinds: Collection[str]) -> Verdict:
    if not set(served(card)) & set(kinds):
        return Verdict(candidate, fit=False, reasons=(f"it serves none of {', '.join(kinds)}",))
    return judge(card, candidate, need)
