"""Choosing drivers: one function for each way of picking that points declare.

Two rules hold for all of them. A driver asked for by name never falls back: missing, broken or unfit, it ends the
start with one error. `auto` walks the cards by priority, keeps every reason, and puts what is broken into quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.near import did_you_mean
from engine.plugin.options import validate_options
from engine.plugin.selection_many import select_fitting, select_kinds, select_ordered
from engine.plugin.verdicts import (
    Selection,
    Verdict,
    broken_verdict,
    consider,
    judge,
    none_fits,
    raised,
    ranked,
    unfit,
)
from engine.types.errors import (
    ConfigError,
    ContractError,
    ModelNotFoundError,
    PluginError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from engine.plugin.card import Card

__all__ = [
    "Selection",
    "Verdict",
    "select",
    "select_architecture",
    "select_claims",
    "select_default_model",
    "select_fitting",
    "select_kinds",
    "select_ordered",
]


def is_auto(asked: str | None) -> bool:
    """Whether the user named no driver."""
    return asked is None or asked.strip() in ("", "auto")


def select(
    registry: Registry,
    point: str,
    need: Any,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
    kind: str = "",
) -> Selection:
    """Choose the one driver of a point.

    Args:
        registry: what is installed.
        point: the point's name.
        need: what the engine asks of the driver.
        asked: the name that the user gave; None or "auto" lets the cards decide.
        options: the options given for this point.
        kind: a label for the selection and its errors.

    Raises:
        PluginError: the asked driver is missing, duplicate, broken, incompatible or unfit (each its own subclass);
            no driver fits; an option is unknown or bad.
    """
    if not is_auto(asked):
        assert asked is not None
        candidate = registry.find(point, asked.strip())
        card = registry.card(candidate)
        verdict = judge(card, candidate, need)
        if not verdict.fit:
            raise unfit(registry, verdict, kind)
        return _selection(point, kind, candidate, card, options, True, [verdict], need)
    verdicts: list[Verdict] = []
    cards, broken = ranked(registry, point)
    for candidate, card in cards:
        verdict = consider(registry, candidate, judge, card, candidate, need)
        verdicts.append(verdict)
        if verdict.fit:
            return _selection(point, kind, candidate, card, options, False, [*verdicts, *broken], need)
    raise none_fits(registry, point, kind, [*verdicts, *broken])


def select_architecture(
    registry: Registry,
    architectures: Sequence[str],
    need: Any,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
    point: str = "model",
) -> Selection:
    """Choose the model's implementation: the driver whose name is the architecture string.

    Args:
        registry: what is installed.
        architectures: config.json's `architectures`; the first that a driver serves is taken.
        need: what the engine asks of the model's body.
        asked: a driver to use whatever the architecture is.
        options: the options given for this point.
        point: the point's name.

    Raises:
        UnsupportedModelError: no installed driver serves any of the architectures; with near matches and reasons.
        PluginError: as `select`, for an asked driver, a duplicate, or a broken driver of this very architecture.
    """
    if not is_auto(asked):
        return select(registry, point, need, asked, options)
    names = [candidate.name for candidate in registry.candidates(point)]
    verdicts: list[Verdict] = []
    for architecture in architectures:
        known = architecture in names or any(c.name == architecture for c in registry.outdated(point))
        if not known and not registry.denies(point, architecture):
            continue
        candidate = registry.find(point, architecture)
        card = registry.card(candidate)
        verdict = judge(card, candidate, need)
        verdicts.append(verdict)
        if verdict.fit:
            return _selection(point, "", candidate, card, options, False, verdicts, need)
    wanted = ", ".join(architectures) or "a model whose config.json names no architecture"
    if verdicts:
        raise UnsupportedModelError(
            f"load {wanted}",
            "its driver does not serve this model: " + " | ".join(str(verdict) for verdict in verdicts),
            "install a driver that does, and name it with --model-impl",
        )
    raise UnsupportedModelError(
        f"load {wanted}",
        f"no installed driver serves it; served are: {', '.join(names) or 'none'}",
        (did_you_mean(architectures[0], names) if architectures else "")
        or "install a distribution that offers the architecture, or name a driver with --model-impl",
    )


def select_claims(
    registry: Registry,
    point: str,
    name: str,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Selection:
    """Choose the one driver whose card claims `name`.

    Args:
        registry: what is installed.
        point: the point's name ("checkpoint").
        name: what the user wants opened: a path or a name.
        asked: a driver to use without asking who claims the name.
        options: the options given for this point.

    Raises:
        ModelNotFoundError: nobody claims the name.
        PluginError: two claim it; or, for an asked driver, as `select`.
    """
    if not is_auto(asked):
        assert asked is not None
        candidate = registry.find(point, asked.strip())
        return _selection(
            point, "", candidate, registry.card(candidate), options, True, [Verdict(candidate, True)], name
        )
    cards, verdicts = ranked(registry, point)
    claiming: list[tuple[Candidate, type[Card]]] = []
    for candidate, card in cards:
        try:
            claims = bool(card.claims(name))  # type: ignore[attr-defined]
        except Exception as error:
            registry.quarantine[candidate] = ContractError(
                f"open {name!r} with driver '{candidate.name}' of {point}",
                f"its claims() raised {raised(error)} ({candidate.value} of {candidate.provenance})",
                f"report it to its author; until then: pip uninstall {candidate.distribution}",
                point=point,
                driver=candidate.name,
                distribution=candidate.provenance,
            )
            verdicts.append(broken_verdict(candidate, registry.quarantine[candidate]))
            continue
        verdicts.append(Verdict(candidate, claims, () if claims else (f"does not claim {name!r}",)))
        if claims:
            registry.find(point, candidate.name)  # two of one name: no name says which one is meant
            claiming.append((candidate, card))
    flag = registry.points[point].option_flag
    if not claiming:
        raise ModelNotFoundError(
            f"open model {name!r}",
            "no checkpoint driver claims it: " + (" | ".join(str(v) for v in verdicts) or "none is installed"),
            f"check the path or the name, or force a driver with {flag}",
        )
    if len(claiming) > 1:
        raise PluginError(
            f"open model {name!r}",
            "several drivers claim it: " + " and ".join(f"{c.name} ({c.provenance})" for c, _ in claiming),
            f"say which one is meant: {flag} " + " or ".join(c.name for c, _ in claiming),
            point=point,
        )
    candidate, card = claiming[0]
    return _selection(point, "", candidate, card, options, False, verdicts, name)


def select_default_model(
    registry: Registry,
    point: str = "checkpoint",
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Selection, str]:
    """The driver and the model's name where the user names no model: the one card that declares `default_model`.

    Raises:
        ConfigError: no card declares one, or several do.
        PluginError: as `select`, for an asked driver.
    """
    verdicts: list[Verdict] = []
    if is_auto(asked):
        cards, verdicts = ranked(registry, point)
    else:
        assert asked is not None
        candidate = registry.find(point, asked.strip())
        cards = [(candidate, registry.card(candidate))]
    offers = [(c, card, name) for c, card in cards if (name := getattr(card, "default_model", None)) is not None]
    for candidate, _, _ in offers:
        registry.find(point, candidate.name)  # as above
    if not offers:
        others = "".join(f"; {verdict}" for verdict in verdicts)
        raise ConfigError(
            "start without naming a model",
            f"no installed checkpoint driver brings a model of its own{others}",
            "name one: --model PATH",
        )
    if len(offers) > 1:
        raise ConfigError(
            "start without naming a model",
            "several drivers bring one: " + " and ".join(f"{name!r} of {c.provenance}" for c, _, name in offers),
            "name one: " + " or ".join(f"--model {name}" for _, _, name in offers),
        )
    candidate, card, name = offers[0]
    verdicts = [*verdicts, Verdict(candidate, True)]
    return _selection(point, "", candidate, card, options, not is_auto(asked), verdicts, name), name


def _selection(
    point: str,
    kind: str,
    candidate: Candidate,
    card: type[Card],
    options: Mapping[str, Any] | None,
    asked: bool,
    verdicts: Iterable[Verdict],
    need: Any = None,
) -> Selection:
    validated = validate_options(point, [(candidate, card)], options)[candidate]
    return Selection(point, kind, candidate, card, validated, asked, tuple(verdicts), need)
