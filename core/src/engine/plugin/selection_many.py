"""Choosing several drivers of one point: one for each kind of layer, or an ordered few for many operations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.near import did_you_mean
from engine.plugin.options import validate_options
from engine.plugin.verdicts import Selection, Verdict, another, consider, judge, none_fits, ranked, unfit
from engine.types.errors import ConfigError, UnfitDriverError

if TYPE_CHECKING:
    from engine.plugin.card import Card

Chosen = tuple[Candidate, "type[Card]"]


# -- one for each kind of layer --------------------------------------------------------------------------------------
def select_kinds(
    registry: Registry,
    point: str,
    needs: Mapping[str, Any],
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Selection]:
    """Choose a driver for each kind of layer that the model has.

    `asked` is one name, which binds every kind that this driver serves and leaves the rest to `auto`; or an exact
    list, "full=x,sliding=y". A card says in `kinds` which it serves (a card without the attribute serves them all). A
    named driver that serves a kind and does not fit its need is an error, as is one that serves none of the kinds.
    Where the point is optional, kinds that no driver is named for get none.

    Args:
        registry: what is installed.
        point: the point's name.
        needs: kind to need, for the kinds that the model has.
        asked: as above; None or "auto" leaves all to the cards.
        options: the options given for this point; each chosen driver gets those that it knows.

    Returns:
        One selection a kind (where it gets one), in the order of `needs`.

    Raises:
        ConfigError: `asked` cannot be read, or names a kind that does not exist or that the model does not have.
        PluginError: as `select`.
    """
    bound: dict[str, tuple[Chosen, Verdict]] = {}
    text = (asked or "auto").strip()
    if "=" in text:
        for kind, name in _exact(registry, point, text, needs).items():
            candidate = registry.find(point, name)
            card = registry.card(candidate)
            bound[kind] = (candidate, card), _fit_or_raise(registry, card, candidate, kind, needs[kind])
    elif text not in ("", "auto"):
        candidate = registry.find(point, text)
        card = registry.card(candidate)
        for kind, need in needs.items():
            if _serves(card, kind):
                bound[kind] = (candidate, card), _fit_or_raise(registry, card, candidate, kind, need)
        if not bound:
            raise UnfitDriverError(
                f"use driver '{text}' for {point}",
                f"it serves layers of kind {_kinds(card)}, the model has {', '.join(needs)}",
                another(registry, point),
                point=point,
                driver=text,
                distribution=candidate.provenance,
            )
    results: dict[str, tuple[Chosen, bool, tuple[Verdict, ...]]] = {}
    for kind, need in needs.items():
        if kind in bound:
            chosen, verdict = bound[kind]
            results[kind] = chosen, True, (verdict,)
        elif not registry.points[point].optional:
            results[kind] = _auto(registry, point, kind, need)
    validated = validate_options(point, [chosen for chosen, _, _ in results.values()], options)
    return [
        Selection(point, kind, candidate, card, validated[candidate], was_asked, verdicts, needs[kind])
        for kind, ((candidate, card), was_asked, verdicts) in results.items()
    ]


def _serves(card: type[Card], kind: str) -> bool:
    kinds = getattr(card, "kinds", None)
    return kinds is None or kind in kinds


def _kinds(card: type[Card]) -> str:
    return ", ".join(sorted(getattr(card, "kinds", ()))) or "none"


def _kind_verdict(card: type[Card], candidate: Candidate, kind: str, need: Any) -> Verdict:
    if not _serves(card, kind):
        return Verdict(candidate, fit=False, reasons=(f"it serves layers of kind {_kinds(card)}, not {kind}",))
    return judge(card, candidate, need)


def _fit_or_raise(registry: Registry, card: type[Card], candidate: Candidate, kind: str, need: Any) -> Verdict:
    verdict = _kind_verdict(card, candidate, kind, need)
    if not verdict.fit:
        raise unfit(registry, verdict, kind)
    return verdict


def _auto(registry: Registry, point: str, kind: str, need: Any) -> tuple[Chosen, bool, tuple[Verdict, ...]]:
    verdicts: list[Verdict] = []
    cards, broken = ranked(registry, point)
    for candidate, card in cards:
        verdict = consider(registry, candidate, _kind_verdict, card, candidate, kind, need)
        verdicts.append(verdict)
        if verdict.fit:
            return (candidate, card), False, (*verdicts, *broken)
    raise none_fits(registry, point, kind, [*verdicts, *broken])


def _exact(registry: Registry, point: str, text: str, needs: Mapping[str, Any]) -> dict[str, str]:
    """Read "full=x,sliding=y"; the entries of "auto" are left out."""
    kinds = registry.points[point].kinds
    flag = registry.points[point].option_flag
    named: dict[str, str] = {}
    for part in text.split(","):
        kind, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not kind or not name:
            raise ConfigError(
                f"{flag}={text}",
                f"'{part.strip()}' is not kind=driver",
                f"write {flag} kind=driver,... or {flag}=driver",
            )
        if kind not in kinds:
            hint = did_you_mean(kind, kinds) or f"the kinds are: {', '.join(kinds)}"
            raise ConfigError(f"{flag}={text}", f"there is no layer kind '{kind}'", hint)
        if kind not in needs:
            raise ConfigError(
                f"{flag}={text}",
                f"the model has no layers of kind '{kind}', it has: {', '.join(needs)}",
                f"leave {kind}= out",
            )
        if kind in named:
            raise ConfigError(f"{flag}={text}", f"'{kind}' is named twice", "name each kind once")
        named[kind] = name
    return {kind: name for kind, name in named.items() if name != "auto"}


# -- an ordered few --------------------------------------------------------------------------------------------------
def select_ordered(
    registry: Registry,
    point: str,
    needs: Mapping[str, Any],
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
    together: Iterable[tuple[str, ...]] = (),
) -> list[Selection]:
    """Choose a driver for each operation: those asked for first, in their order, then the rest by priority.

    An operation goes to the first driver whose card's `operations` contains it and that fits its need. Drivers asked
    for by name come first but do not shut the others out: an operation that none of them has goes to the rest.

    Args:
        registry: what is installed.
        point: the point's name.
        needs: operation to need.
        asked: names separated by commas; None or "auto" leaves all to the cards.
        options: the options given for this point; each chosen driver gets those that it knows.
        together: groups of operations that are taken from one driver.

    Returns:
        One selection an operation (its `kind`), in the order of `needs`.

    Raises:
        ConfigError: a name is asked for twice.
        UnfitDriverError: an asked driver serves none of the operations.
        PluginError: no driver serves an operation, with everybody's reasons; or as `select`.
    """
    named = _named(registry, point, asked)
    first: list[Chosen] = [(candidate, registry.card(candidate)) for candidate in named]
    cards, broken = ranked(registry, point)
    order = first + [pair for pair in cards if pair[0] not in named]

    taken: dict[str, tuple[Chosen, tuple[Verdict, ...]]] = {}
    refusals: dict[Candidate, list[str]] = {candidate: [] for candidate in named}
    for group in _groups(needs, together):
        verdicts: list[Verdict] = []
        for candidate, card in order:
            if candidate in registry.quarantine and candidate not in named:
                continue
            wanted = {operation: needs[operation] for operation in group}
            if candidate in named:
                verdict = _operations_verdict(card, candidate, wanted)
            else:
                verdict = consider(registry, candidate, _operations_verdict, card, candidate, wanted)
            verdicts.append(verdict)
            if verdict.fit:
                for operation in group:
                    taken[operation] = (candidate, card), (*verdicts, *broken)
                break
            if candidate in refusals:
                refusals[candidate] += [reason for reason in verdict.reasons if reason not in refusals[candidate]]
        else:
            raise none_fits(registry, point, ", ".join(group), [*verdicts, *broken])

    used = {chosen[0] for chosen, _ in taken.values()}
    for candidate in named:
        if candidate not in used:
            reasons = refusals[candidate] or ["drivers named before it take every operation that it offers"]
            raise unfit(registry, Verdict(candidate, fit=False, reasons=("it serves no operation", *reasons)))
    validated = validate_options(point, [taken[operation][0] for operation in needs], options)
    selections = []
    for operation in needs:
        (candidate, card), group_verdicts = taken[operation]
        was_asked, need = candidate in named, needs[operation]
        selections.append(
            Selection(point, operation, candidate, card, validated[candidate], was_asked, group_verdicts, need)
        )
    return selections


def _groups(needs: Mapping[str, Any], together: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    group_of = {operation: group for group in together for operation in group}
    groups = (tuple(o for o in group_of.get(operation, (operation,)) if o in needs) for operation in needs)
    return list(dict.fromkeys(groups))


def _operations_verdict(card: type[Card], candidate: Candidate, needs: Mapping[str, Any]) -> Verdict:
    offered: Collection[str] = getattr(card, "operations", frozenset())
    reasons: list[str] = []
    for operation, need in needs.items():
        if operation in offered:
            reasons += judge(card, candidate, need).reasons
        else:
            reasons.append(f"it does not offer {operation}")
    return Verdict(candidate, fit=not reasons, reasons=tuple(dict.fromkeys(reasons)))


# -- all that fit, in order ------------------------------------------------------------------------------------------
def select_fitting(
    registry: Registry,
    point: str,
    need: Any,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Selection]:
    """Choose every driver that fits: those asked for first, in their order, then the others by priority.

    Who of them does a piece of work is decided later, by asking their bodies in this order.

    Args:
        registry: what is installed.
        point: the point's name.
        need: what the engine asks of each driver.
        asked: names separated by commas; None or "auto" leaves all to the cards.
        options: the options given for this point; each chosen driver gets those that it knows.

    Raises:
        ConfigError: a name is asked for twice.
        PluginError: an asked driver does not fit; no driver fits, with everybody's reasons; or as `select`.
    """
    chosen: list[tuple[Chosen, bool]] = []
    verdicts: list[Verdict] = []
    named = _named(registry, point, asked)
    for candidate in named:
        card = registry.card(candidate)
        verdict = judge(card, candidate, need)
        if not verdict.fit:
            raise unfit(registry, verdict, "")
        chosen.append(((candidate, card), True))
        verdicts.append(verdict)
    cards, broken = ranked(registry, point)
    for candidate, card in cards:
        if candidate in named:
            continue
        verdict = consider(registry, candidate, judge, card, candidate, need)
        verdicts.append(verdict)
        if verdict.fit:
            chosen.append(((candidate, card), False))
    if not chosen:
        raise none_fits(registry, point, "", [*verdicts, *broken])
    validated = validate_options(point, [pair for pair, _ in chosen], options)
    return [
        Selection(point, "", candidate, card, validated[candidate], was_asked, (*verdicts, *broken), need)
        for (candidate, card), was_asked in chosen
    ]


def _named(registry: Registry, point: str, asked: str | None) -> list[Candidate]:
    """The drivers of a comma-separated list."""
    names = [] if asked is None else [name.strip() for name in asked.split(",") if name.strip() not in ("", "auto")]
    if len(set(names)) < len(names):
        flag = registry.points[point].option_flag
        raise ConfigError(f"{flag}={asked}", "a name stands there twice", "name each once")
    return [registry.find(point, name) for name in names]
