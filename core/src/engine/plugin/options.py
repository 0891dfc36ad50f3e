"""The options of drivers and of hook plugins: from strings and plain values to a typed `Options`.

Drivers' are `--POINT.OPTION VALUE`, hook plugins' `--hooks.NAME.OPTION VALUE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from engine.plugin.hints import did_you_mean
from engine.plugin.loading import load_entry_point
from engine.plugin.points import HOOK_PROCESSES, HOOKS
from engine.types.errors import DriverNotFoundError, OptionsError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from engine.plugin.candidate import Candidate
    from engine.plugin.card import Card
    from engine.plugin.discovery import Registry


def validate_options(
    point: str, chosen: Sequence[tuple[Candidate, type[Card]]], given: Mapping[str, Any] | None
) -> dict[Candidate, Any]:
    """Validate the options given for a point against the drivers chosen for it.

    A point may have several chosen drivers (one a layer kind, or an ordered few): each gets the options that it knows,
    and an option that none of them knows is an error.

    Args:
        point: the point's name.
        chosen: the chosen drivers; repetitions are fine.
        given: option name to value; values may be the strings of a command line.

    Returns for each chosen driver an instance of its `Options`, or None where it has none.

    Raises OptionsError: naming the option, the value, and near matches for a name that is unknown.
    """
    given = dict(given or {})
    cards = dict(chosen)
    _check_names(point, "the chosen driver", cards, given)
    return {candidate: build_options(candidate, card, given) for candidate, card in cards.items()}


def _check_names(asked: str, what: str, owners: Mapping[Candidate, Any], given: Mapping[str, Any]) -> None:
    """Raise OptionsError for an option that none of the owners (cards, classes of hook plugins) has."""
    known = {name for owner in owners.values() for name in _option_names(owner)}
    for name, value in given.items():
        if name in known:
            continue
        who = " and ".join(dict.fromkeys(f"'{candidate.name}' ({candidate.provenance})" for candidate in owners))
        found, remedy = "takes no options", "leave the option out"
        if known:
            found = "has no such option"
            remedy = did_you_mean(name, known) or "its options: " + ", ".join(sorted(known))
        blame = next(iter(owners)).blame
        raise OptionsError(f"set {asked}.{name} to {value!r}", f"{what} {who} {found}", remedy, **blame)


def _option_names(card: Any) -> set[str]:
    """The options of a card, or of a hook plugin's class."""
    options = getattr(card, "Options", None)
    return set() if options is None else set(options.model_fields)


def build_options(candidate: Candidate, card: Any, given: Mapping[str, Any]) -> Any:
    """An instance of the `Options` of a card, or of a hook plugin's class, from those of the given that it has; None
    where it has none. Raises OptionsError for a bad value."""
    options = getattr(card, "Options", None)
    if options is None:
        return None
    from pydantic import ValidationError

    try:
        fields = options.model_fields
        mine = {name: _chosen(fields[name].annotation, value) for name, value in given.items() if name in fields}
        return options.model_validate(mine)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"])
            faults.append(f"{path or 'options'}: {fault['msg']} (given: {fault['input']!r})")
        found, remedy = f"{candidate.provenance} says: {'; '.join(faults)}", f"its options: {_listing(options)}"
        refused = candidate.error(OptionsError, found, remedy, "set options of")
        refused.options = tuple(str(fault["loc"][0]) for fault in error.errors() if fault["loc"])
        raise refused from error


def _choices(annotation: Any) -> list[Any]:
    """What a Literal allows, also where it is one of several types; [] for other types."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _chosen(annotation: Any, value: Any) -> Any:
    """The choice that the string of a command line means: pydantic does not take "4" for one of the numbers 4 and 8."""
    if not isinstance(value, str) or value in (choices := _choices(annotation)):
        return value
    return next((choice for choice in choices if str(choice).lower() == value.lower()), value)


def _kinds(annotation: Any) -> list[str]:
    """What is taken, choice by choice and type by type."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for inner in get_args(annotation) for kind in _kinds(inner)]
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    named = "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    return [*map(repr, _choices(annotation))] or [named]


def _listing(options: type[BaseModel]) -> str:
    entries = []
    for name, field in options.model_fields.items():
        kind = " or ".join(_kinds(field.annotation))
        entries.append(f"{name} ({kind}, {'required' if field.is_required() else f'default {field.default!r}'})")
    return ", ".join(entries)


# -- hook plugins ------------------------------------------------------------------------------------------------------
HookOptions = Mapping[str, Mapping[str, Any]]
"""By plugin, its name with underscores: option to value."""


def plain(name: str) -> str:
    """A plugin's name as options know it: dashes and underscores are the same."""
    return name.replace("-", "_").lower()


def check_hook_options(registry: Registry, given: HookOptions) -> dict[str, dict[str, Any]]:
    """The options of hook plugins, validated, as plain data for every process; nothing is imported of a plugin that
    none are given for. Who gives options names the plugin, so what is broken stops the start.

    Raises:
        DriverNotFoundError: no hook plugin has this name. DriverDeniedError: the list of plugins denies it.
        DuplicateDriverError: two distributions register it.
        DriverImportError: it cannot be imported.
        OptionsError: it has no such option, or the value is bad.
    """
    for name, options in given.items():
        everyone = [c for process in HOOK_PROCESSES for c in registry.candidates(f"{HOOKS}.{process}")]
        plugins = {c: load_entry_point(c) for c in everyone if plain(c.name) == plain(name)}
        if not plugins:
            hooks = (c for c in registry.denied if c.point.startswith(f"{HOOKS}."))
            if denied := next((c for c in hooks if plain(c.name) == plain(name)), None):
                raise registry.denial(denied)
            raise _not_found(everyone, name, options)
        _check_names(f"{HOOKS}.{name}", "the hook plugin", plugins, options)
        for candidate, plugin in plugins.items():
            build_options(candidate, plugin, options)
    return {plain(name): dict(options) for name, options in given.items()}


def _not_found(installed: Sequence[Candidate], name: str, options: Mapping[str, Any]) -> DriverNotFoundError:
    names = {plain(c.name) for c in installed}
    listing = ", ".join(dict.fromkeys(f"{c.name} ({c.provenance})" for c in installed)) or "none"
    return DriverNotFoundError(
        f"set {HOOKS}.{name}.{next(iter(options), '')}",
        f"no installed distribution has a hook plugin of this name; installed: {listing}",
        did_you_mean(plain(name), names) or "install the distribution that brings it, or leave the option out",
        point=HOOKS,
        driver=name,
    )
