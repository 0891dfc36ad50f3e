"""The options of drivers and of hook plugins: from strings and plain values to a typed `Options`.

Drivers' are `--POINT.OPTION VALUE`, hook plugins' `--hooks.NAME.OPTION VALUE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

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

    Returns:
        For each chosen driver an instance of its `Options`, or None where it has none.

    Raises:
        OptionsError: naming the option, the value, and near matches for a name that is unknown.
    """
    given = dict(given or {})
    cards = dict(chosen)
    known = {name for card in cards.values() for name in option_names(card)}
    for name, value in given.items():
        if name not in known:
            raise _unknown(point, name, value, cards, known)
    return {
        candidate: build_options(point, candidate, card, {k: v for k, v in given.items() if k in option_names(card)})
        for candidate, card in cards.items()
    }


def option_names(card: Any) -> set[str]:
    """The options of a card, or of a hook plugin's class."""
    options = getattr(card, "Options", None)
    return set() if options is None else set(options.model_fields)


def build_options(point: str, candidate: Candidate, card: Any, given: Mapping[str, Any]) -> Any:
    """An instance of the card's `Options`; None where it has none. Raises OptionsError for a bad value."""
    options = getattr(card, "Options", None)
    if options is None:
        return None
    from pydantic import ValidationError

    try:
        fields = options.model_fields
        return options.model_validate(
            {
                name: _chosen(fields[name].annotation, value) if name in fields else value
                for name, value in given.items()
            }
        )
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"])
            faults.append(f"{path or 'options'}: {fault['msg']} (given: {fault['input']!r})")
        refused = OptionsError(
            f"set options of {'plugin' if point.startswith('hooks.') else 'driver'} '{candidate.name}' for {point}",
            f"{candidate.provenance} says: " + "; ".join(faults),
            "its options: " + _listing(options),
            point=point,
            driver=candidate.name,
            distribution=candidate.provenance,
        )
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


def _unknown(point: str, name: str, value: Any, cards: Mapping[Candidate, type[Card]], known: set[str]) -> OptionsError:
    names = " and ".join(f"'{candidate.name}' ({candidate.provenance})" for candidate in cards)
    if known:
        found = f"the chosen driver {names} has no such option"
        remedy = did_you_mean(name, known) or "its options: " + ", ".join(sorted(known))
    else:
        found = f"the chosen driver {names} takes no options"
        remedy = "leave the option out, or choose the driver that it belongs to"
    candidate = next(iter(cards))
    return OptionsError(
        f"set {point}.{name} to {value!r}",
        found,
        remedy,
        point=point,
        driver=candidate.name,
        distribution=candidate.provenance,
    )


def _listing(options: type[BaseModel]) -> str:
    entries = []
    for name, field in options.model_fields.items():
        choices = " or ".join(map(repr, _choices(field.annotation)))
        kind = choices or getattr(field.annotation, "__name__", str(field.annotation))
        entries.append(f"{name} ({kind}, {'required' if field.is_required() else f'default {field.default!r}'})")
    return ", ".join(entries)


# -- hook plugins ------------------------------------------------------------------------------------------------------
HookOptions = Mapping[str, Mapping[str, Any]]
"""By plugin, its name with underscores: option to value."""


def plain(name: str) -> str:
    """A plugin's name as options know it: dashes and underscores are the same."""
    return name.replace("-", "_").lower()


def check_hook_options(registry: Registry, given: HookOptions) -> dict[str, dict[str, Any]]:
    """Validate options of hook plugins; nothing is imported of a plugin that none are given for.

    Who gives options names the plugin, so what is broken stops the start: "explicit never falls back".

    Returns:
        The same, as plain data for every process.

    Raises:
        DriverNotFoundError: no hook plugin has this name. DriverDeniedError: the list of plugins denies it.
        DuplicateDriverError: two distributions register it.
        DriverImportError: it cannot be imported.
        OptionsError: it has no such option, or the value is bad.
    """
    for name, options in given.items():
        plugins = [c for process in HOOK_PROCESSES for c in _plugins(registry, process, name)]
        if not plugins:
            for candidate in registry.denied:
                if candidate.point.startswith(f"{HOOKS}.") and plain(candidate.name) == plain(name):
                    raise registry.denial(candidate)
            raise _not_found(registry, name, options)
        _check(name, plugins, options)
    return {plain(name): dict(options) for name, options in given.items()}


def _plugins(registry: Registry, process: str, name: str) -> list[Candidate]:
    """The candidates of one process that options of this name are for."""
    return [c for c in registry.candidates(f"{HOOKS}.{process}") if plain(c.name) == plain(name)]


def build_hook_options(candidate: Candidate, plugin: Any, given: Mapping[str, Any]) -> Any:
    """An instance of a plugin's `Options` from those of the given options that it has. Raises OptionsError."""
    known = option_names(plugin)
    return build_options(candidate.point, candidate, plugin, {k: v for k, v in given.items() if k in known})


def _check(name: str, plugins: list[Candidate], options: Mapping[str, Any]) -> None:
    loaded = {candidate: load_entry_point(candidate) for candidate in plugins}
    known = {option for plugin in loaded.values() for option in option_names(plugin)}
    for option, value in options.items():
        if option not in known:
            where = dict.fromkeys(candidate.provenance for candidate in plugins)
            raise OptionsError(
                f"set {HOOKS}.{name}.{option} to {value!r}",
                f"the hook plugin '{plugins[0].name}' ({', '.join(where)}) "
                + ("has no such option" if known else "takes no options"),
                (did_you_mean(option, known) or "its options: " + ", ".join(sorted(known)))
                if known
                else "leave the option out",
                point=plugins[0].point,
                driver=plugins[0].name,
                distribution=plugins[0].provenance,
            )
    for candidate, plugin in loaded.items():
        build_hook_options(candidate, plugin, options)


def _not_found(registry: Registry, name: str, options: Mapping[str, Any]) -> DriverNotFoundError:
    installed = [c for process in HOOK_PROCESSES for c in registry.candidates(f"{HOOKS}.{process}")]
    names = {plain(c.name) for c in installed}
    listing = ", ".join(dict.fromkeys(f"{c.name} ({c.provenance})" for c in installed)) or "none"
    return DriverNotFoundError(
        f"set {HOOKS}.{name}.{next(iter(options), '')}",
        f"no installed distribution has a hook plugin of this name; installed: {listing}",
        did_you_mean(plain(name), names) or "install the distribution that brings it, or leave the option out",
        point=HOOKS,
        driver=name,
    )
