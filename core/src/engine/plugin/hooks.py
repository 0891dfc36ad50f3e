"""The relay: hooks resolved, at start, to plain callables.

One pluggy call costs microseconds, a call of None nothing: `relay.step_done` is None where nobody listens, so callers
write

    if relay.step_done:
        relay.step_done(stats=stats)

Hooks that decide are called alike, and raise where they refuse; `engine.plugin.hook_calls` has each kind. pluggy keeps
the order and checks the signatures; it is not in the way of a call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pluggy

from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry
from engine.plugin.hints import did_you_mean
from engine.plugin.hook_calls import DECIDERS, Chain, Checks, Failures, Filters, Implementation, Observers, Wraps
from engine.plugin.hookspecs import HOOKSPECS, facts_of
from engine.plugin.loading import load_entry_point
from engine.plugin.options import HookOptions, build_options, plain
from engine.plugin.points import HOOKS
from engine.types.errors import ContractError, PluginError

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""An observing implementation that has raised this often is not called again."""

Hook = Callable[..., None]


class HookRelay:
    """The hooks of one process. Each hook is an attribute: a callable that takes keywords, or None.

    Broken plugins (import fails, misspelt hook, wrong arguments) are put into the registry's quarantine and logged;
    they never end the start, because nobody asked for them by name. Whoever gives a plugin options asks for it.

    Args:
        process: "frontend", "core" or "worker".
        registry: what is installed.
        max_failures: after how many exceptions an observing implementation is disabled.
        options: of hook plugins, validated by the launcher.

    Attributes:
        plugins: those at work.
        failures: how often an implementation raised, by (plugin, hook).

    Raises:
        DuplicateDriverError: two distributions register hook plugins under one name.
        PluginError: a plugin that was given options is broken.
    """

    engine_started: Hook | None
    engine_stopping: Hook | None
    admit: Checks | None
    rewrite_prompt: Chain | None
    output_filter: Filters | None
    request_received: Hook | None
    request_finished: Hook | None
    stats: Hook | None
    http_routes: Observers | None
    http_middleware: Wraps | None
    metrics: Observers | None
    step_done: Hook | None
    kv_events: Hook | None
    worker_started: Hook | None
    worker_stopping: Hook | None

    def __init__(
        self,
        process: str,
        registry: Registry,
        max_failures: int = MAX_FAILURES,
        options: HookOptions | None = None,
    ) -> None:
        self.process = process
        self.failures = Failures()
        self._registry = registry
        self._options = options or {}
        manager = _manager(process)
        loaded: dict[str, Candidate] = {}
        for candidate in registry.candidates(f"{HOOKS}.{process}"):
            registry.find(candidate.point, candidate.name)  # raises where two have that name
            try:
                _register(manager, candidate, self._load(candidate))
            except PluginError as error:
                if plain(candidate.name) in self._options:
                    raise
                self.leave_out(candidate, error)
            else:
                loaded[candidate.name] = candidate
        self.plugins = tuple(loaded.values())
        for name in _names(process):
            implementations = [
                Implementation(name, loaded[impl.plugin_name], impl.function, tuple(impl.argnames), self.failures)
                for impl in reversed(getattr(manager.hook, name).get_hookimpls())
            ]
            setattr(self, name, self._resolved(name, implementations, max_failures) if implementations else None)

    def __repr__(self) -> str:
        heard = [name for name in _names(self.process) if getattr(self, name) is not None]
        return f"HookRelay({self.process!r}, plugins={[c.name for c in self.plugins]}, heard={heard})"

    def _load(self, candidate: Candidate) -> Any:
        """What the entry point names; a class as an object, built with its options where it has some."""
        plugin: Any = load_entry_point(candidate)
        try:
            options = build_options(candidate, plugin, self._options.get(plain(candidate.name), {}))
            if not isinstance(plugin, type):
                return plugin
            return plugin() if options is None else plugin(options)
        except PluginError:
            raise
        except Exception as error:
            raise _contract(candidate, f"{type(error).__name__}: {error}") from error

    def _resolved(
        self, name: str, implementations: list[Implementation], max_failures: int
    ) -> Observers | Checks | Chain | Filters | Wraps:
        decider = DECIDERS.get(facts_of(getattr(HOOKSPECS[self.process], name)).kind)
        if decider is not None:
            return decider(implementations)
        return Observers(implementations, max_failures, lambda: setattr(self, name, None))

    def leave_out(self, candidate: Candidate, error: PluginError) -> None:
        """Put a broken plugin into quarantine, and say so."""
        self._registry.quarantine[candidate] = error
        logger.warning("a hook plugin is broken and left out: %s", error)


def check_hooks_of(candidate: Candidate, plugin: object) -> None:
    """See whether a start would take a hook plugin, without building what is a class.

    Raises ContractError: it misspells a hook or its arguments, implements one of another process, or not by a function.
    """
    _register(_manager(_process(candidate)), candidate, plugin)


def _manager(process: str) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("engine")
    manager.add_hookspecs(HOOKSPECS[process])
    return manager


def _names(process: str) -> list[str]:
    return [name for name in vars(HOOKSPECS[process]) if not name.startswith("_")]


def _process(candidate: Candidate) -> str:
    return candidate.point.partition(".")[2]


def _register(manager: pluggy.PluginManager, candidate: Candidate, plugin: object) -> None:
    """Enter a plugin. Raises ContractError, and leaves it out, where it is no implementation of the manager's hooks."""
    try:
        manager.register(plugin, name=candidate.name)
        _check(manager, candidate, plugin)
    except Exception as error:
        if manager.has_plugin(candidate.name):
            manager.unregister(name=candidate.name)
        if isinstance(error, ContractError):
            raise
        raise _contract(candidate, f"{type(error).__name__}: {error}") from error


def _check(manager: pluggy.PluginManager, candidate: Candidate, plugin: object) -> None:
    """Raise ContractError where the plugin wraps a hook, implements one by a coroutine, which nobody would await, or
    one that is no hook of this process."""
    unknown: list[str] = []
    for hook in manager.get_hookcallers(plugin) or ():
        for implementation in hook.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if implementation.wrapper or implementation.hookwrapper:
                wraps = f"it wraps {hook.name}: hooks are resolved to plain calls and cannot be wrapped"
                raise _contract(candidate, wraps)
            if inspect.iscoroutinefunction(implementation.function):
                raise _contract(candidate, f"its {hook.name} is a coroutine function: hooks are plain functions")
            if not hook.has_spec() and not implementation.optionalhook:
                unknown.append(hook.name)
    if not unknown:
        return
    process = _process(candidate)
    elsewhere = [p for p, spec in HOOKSPECS.items() if p != process and hasattr(spec, unknown[0])]
    names = _names(process)
    hint = did_you_mean(unknown[0], names) or f"the hooks of this process are: {', '.join(names)}"
    if elsewhere:
        hint = f"it is a hook of {elsewhere[0]}: register the plugin in engine.hooks.{elsewhere[0]}.v0"
    found = f"it implements {', '.join(map(repr, unknown))}, which is no hook of {process}"
    raise _contract(candidate, found, hint)


def _contract(candidate: Candidate, found: str, remedy: str = "") -> ContractError:
    return ContractError(
        f"use plugin '{candidate.name}' for {candidate.point}",
        f"{found} ({candidate.value} of {candidate.provenance})",
        remedy or f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}",
        **candidate.blame,
    )
