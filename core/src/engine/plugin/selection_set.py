"""Choosing a set of drivers that work together: those named by the user, and one for each job that must be done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.options import validate_options
from engine.plugin.verdicts import Selection, Verdict, consider, judge, ranked, unfit
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.plugin.card import Card


def select_set(
    registry: Registry,
    point: str,
    need: Any,
    jobs: Collection[str],
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Selection]:
    """Choose the drivers of a point of which any number are at work.

    A card says in `parameters` which of the jobs it does; each job is done by one driver. Those named by the user are
    always at work. A job that none of them does goes to the first by priority that fits and whose jobs are all free; a
    job that nobody does stays undone, and what asks for it is refused.

    Args:
        registry: what is installed.
        point: the point's name.
        need: what the engine asks of each driver.
        jobs: all that there are, in the order in which their drivers shall stand.
        asked: names separated by commas; None or "auto" names none.
        options: the options given for this point; each chosen driver gets those that it knows.

    Returns:
        The drivers with jobs in the order of these, then the other named ones in theirs.

    Raises:
        ConfigError: a name is asked for twice, two named drivers do the same job, or an option is for nobody.
        PluginError: as `select`, for the named drivers.
    """
    flag = registry.points[point].option_flag
    names = [] if asked is None else [name.strip() for name in asked.split(",") if name.strip() not in ("", "auto")]
    if len(set(names)) < len(names):
        raise ConfigError(f"{flag}={asked}", "a name stands there twice", "name each once")
    chosen: list[tuple[Candidate, type[Card], tuple[Verdict, ...], bool]] = []
    taken: dict[str, Candidate] = {}

    def take(candidate: Candidate, card: type[Card], verdicts: tuple[Verdict, ...], named: bool) -> None:
        chosen.append((candidate, card, verdicts, named))
        taken.update(dict.fromkeys(_jobs(card), candidate))

    for name in names:
        candidate = registry.find(point, name)
        card = registry.card(candidate)
        verdict = judge(card, candidate, need)
        if not verdict.fit:
            raise unfit(registry, verdict)
        for job in _jobs(card):
            if job in taken:
                raise ConfigError(
                    f"{flag}={asked}", f"both '{taken[job].name}' and '{name}' serve {job}", "name one of them"
                )
        take(candidate, card, (verdict,), True)
    cards, broken = ranked(registry, point)
    for job in jobs:
        verdicts: list[Verdict] = []
        for candidate, card in cards:
            if job in taken or job not in _jobs(card):
                continue
            verdict = consider(registry, candidate, _free_verdict, card, candidate, need, taken)
            verdicts.append(verdict)
            if verdict.fit:
                take(candidate, card, (*verdicts, *broken), False)
    place = {job: index for index, job in enumerate(jobs)}
    chosen.sort(key=lambda entry: min((place.get(job, len(place)) for job in _jobs(entry[1])), default=len(place)))
    if not chosen:
        if options:
            raise ConfigError(f"set options of {point}", "no driver of it is at work", "leave them out")
        return []
    validated = validate_options(point, [(candidate, card) for candidate, card, _, _ in chosen], options)
    return [
        Selection(point, "", candidate, card, validated[candidate], named, verdicts, need)
        for candidate, card, verdicts, named in chosen
    ]


def _jobs(card: type[Card]) -> Collection[str]:
    jobs: Collection[str] = getattr(card, "parameters", frozenset())
    return jobs


def _free_verdict(card: type[Card], candidate: Candidate, need: Any, taken: Mapping[str, Candidate]) -> Verdict:
    """Whether it fits, and none of its jobs is another's already."""
    verdict = judge(card, candidate, need)
    others = [f"'{taken[job].name}' serves {job} already" for job in sorted(_jobs(card)) if job in taken]
    return Verdict(candidate, fit=verdict.fit and not others, reasons=(*verdict.reasons, *others))
