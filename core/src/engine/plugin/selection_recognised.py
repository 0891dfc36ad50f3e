"""Choosing a driver that recognises the model, where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.points import NONE
from engine.plugin.selection import is_auto, select
from engine.plugin.verdicts import Selection, Verdict, consider, judge, raised, ranked
from engine.types.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from engine.plugin.card import Card


def select_recognised(
    registry: Registry,
    point: str,
    need: Any,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Selection | None:
    """Choose the first driver by priority that fits and whose card `recognises` the need. A driver that is named need
    not recognise anything.

    Args:
        registry: what is installed.
        point: the point's name.
        need: what the engine asks of the driver.
        asked: the name that the user gave; "none" for no driver, None or "auto" lets the cards decide.
        options: the options given for this point.

    Returns:
        None where no driver recognises the need, or none is wanted.

    Raises:
        ConfigError: there are options and no driver to take them.
        PluginError: as `select`, for an asked driver; a duplicate.
    """
    wanted = asked is None or asked.strip() != NONE
    if wanted and not is_auto(asked):
        return select(registry, point, need, asked, options)
    if wanted:
        verdicts: list[Verdict] = []
        cards, broken = ranked(registry, point)
        for candidate, card in cards:
            verdict = consider(registry, candidate, recognition, card, candidate, need)
            verdicts.append(verdict)
            if verdict.fit:
                chosen = select(registry, point, need, candidate.name, options)
                return Selection(
                    point, "", candidate, card, chosen.options, False, (*verdicts, *broken), need
                )  # as asked for by name, but for who asked
    if options:
        name, value = next(iter(options.items()))
        raise ConfigError(
            f"set {point}.{name} to {value!r}",
            f"no {point} is at work" + ("" if wanted else ", as was asked"),
            f"name one with {registry.points[point].option_flag} DRIVER, or leave the option out",
        )
    return None


def recognition(card: type[Card], candidate: Candidate, need: Any) -> Verdict:
    """Whether the driver fits and recognises the need. Raises ContractError for a card that cannot say."""
    verdict = judge(card, candidate, need)
    if not verdict.fit:
        return verdict
    try:
        known = bool(card.recognises(need))  # type: ignore[attr-defined]
    except Exception as error:
        raise ContractError(
            f"use driver '{candidate.name}' for {candidate.point}",
            f"its recognises() raised {raised(error)} ({candidate.value} of {candidate.provenance})",
            "its author has to answer True or False",
            point=candidate.point,
            driver=candidate.name,
            distribution=candidate.provenance,
        ) from error
    return Verdict(candidate, known, () if known else ("the model's chat template has nothing of its form",))
