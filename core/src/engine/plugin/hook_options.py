"""The options of hook plugins: `--hooks.NAME.OPTION VALUE`, for a plugin whose class has an `Options` model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.plugin.near import did_you_mean
from engine.plugin.options import build_options, option_names
from engine.plugin.points import HOOK_PROCESSES, HOOKS
from engine.types.errors import DriverNotFoundError, OptionsError

if TYPE_CHECKING:
    from engine.plugin.discovery import Candidate, Registry

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
        plugins = [c for process in HOOK_PROCESSES for c in named(registry, process, name)]
        if not plugins:
            for candidate in registry.denied:
                if candidate.point.startswith(f"{HOOKS}.") and plain(candidate.name) == plain(name):
                    raise registry.denial(candidate)
            raise _not_found(registry, name, options)
        _check(name, plugins, options)
    return {plain(name): dict(options) for name, options in given.items()}


def named(registry: Registry, process: str, name: str) -> list[Candidate]:
    """The candidates of one process that options of this name are for."""
    return [c for c in registry.candidates(f"{HOOKS}.{process}") if plain(c.name) == plain(name)]


def build(candidate: Candidate, plugin: Any, given: Mapping[str, Any]) -> Any:
    """An instance of a plugin's `Options` from those of the given options that it has. Raises OptionsError."""
    known = option_names(plugin)
    return build_options(candidate.point, candidate, plugin, {k: v for k, v in given.items() if k in known})


def _check(name: str, plugins: list[Candidate], options: Mapping[str, Any]) -> None:
    from engine.plugin.loading import load_entry_point

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
        build(candidate, plugin, options)


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
