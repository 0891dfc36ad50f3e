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
from engine.plugin.discovery import Registry, duplicate
from engine.plugin.hints import did_you_mean
from engine.plugin.hook_calls import Chain, Checks, Failures, Filters, Implementation, Observers, Wraps
from engine.plugin.hookspecs import HOOKSPECS, facts_of
from engine.plugin.options import HookOptions, build_hook_options, plain
from engine.types.errors import ContractError, PluginError

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""An observing implementation that has raised this often is not called again."""

Hook = Callable[..., None]

_Decider = Checks | Chain | Filters | Wraps
_DECIDERS: dict[str, type[_Decider]] = {"check": Checks, "chain": Chain, "filter": Filters, "wrap": Wraps}


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
        self.plugins: tuple[Candidate, ...] = ()
        self.failures: Failures = Failures()
        self._registry = registry
        self._options = options or {}
        spec = HOOKSPECS[process]
        names = _names(spec)
        manager = pluggy.PluginManager("engine")
        manager.add_hookspecs(spec)
        loaded = self._register(manager, registry)
        self.plugins = tuple(loaded.values())
        for name in names:
            setattr(self, name, self._resolve(name, manager, loaded, max_failures))

    def __repr__(self) -> str:
        heard = [name for name in _names(HOOKSPECS[self.process]) if getattr(self, name) is not None]
        return f"HookRelay({self.process!r}, plugins={[c.name for c in self.plugins]}, heard={heard})"

    def _register(self, manager: pluggy.PluginManager, registry: Registry) -> dict[str, Candidate]:
        from engine.plugin.loading import load_entry_point

        candidates = registry.candidates(f"hooks.{self.process}")
        loaded: dict[str, Candidate] = {}
        for candidate in candidates:
            same = [c for c in candidates if c.name == candidate.name]
            if len(same) > 1:
                raise duplicate(candidate.point, same)
            try:
                _register(manager, candidate, self._instance(candidate, load_entry_point(candidate)))
            except PluginError as error:
                self._quarantine(candidate, error)
            except Exception as error:
                self._quarantine(candidate, _contract(candidate, f"{type(error).__name__}: {error}", ""))
            else:
                loaded[candidate.name] = candidate
        return loaded

    def _instance(self, candidate: Candidate, plugin: Any) -> Any:
        """A plugin that is a class as an object, built with its options where it has some."""
        options = build_hook_options(candidate, plugin, self._options.get(plain(candidate.name), {}))
        if not isinstance(plugin, type):
            return plugin
        return plugin() if options is None else plugin(options)

    def _resolve(
        self, name: str, manager: pluggy.PluginManager, loaded: dict[str, Candidate], max_failures: int
    ) -> Observers | _Decider | None:
        implementations = [
            Implementation(name, loaded[impl.plugin_name], impl.function, impl.argnames, self.failures)
            for impl in reversed(getattr(manager.hook, name).get_hookimpls())
        ]
        if not implementations:
            return None
        kind = facts_of(getattr(HOOKSPECS[self.process], name)).kind
        if kind in _DECIDERS:
            return _DECIDERS[kind](implementations)
        return Observers(implementations, max_failures, lambda: setattr(self, name, None))

    def _quarantine(self, candidate: Candidate, error: PluginError) -> None:
        if plain(candidate.name) in self._options:
            raise error
        self.leave_out(candidate, error)

    def leave_out(self, candidate: Candidate, error: PluginError) -> None:
        """Put a broken plugin into quarantine, and say so."""
        self._registry.quarantine[candidate] = error
        logger.warning("a hook plugin is broken and left out: %s", error)


def _names(spec: type) -> list[str]:
    return [name for name in vars(spec) if not name.startswith("_")]


def check_hooks_of(candidate: Candidate, plugin: object) -> None:
    """See whether a start would take a hook plugin, without building what is a class.

    Raises ContractError: it misspells a hook or its arguments, implements one of another process, or not by a function.
    """
    manager = pluggy.PluginManager("engine")
    manager.add_hookspecs(HOOKSPECS[_process(candidate)])
    _register(manager, candidate, plugin)


def _process(candidate: Candidate) -> str:
    return candidate.point.partition(".")[2]


def _register(manager: pluggy.PluginManager, candidate: Candidate, plugin: object) -> None:
    """Enter a plugin. Raises ContractError, and leaves it out, where it is no implementation of the manager's hooks."""
    try:
        manager.register(plugin, name=candidate.name)
        _refuse_what_is_no_plain_call(manager, plugin)
        _refuse_misspelt(manager, candidate, plugin)
    except Exception as error:
        if manager.has_plugin(candidate.name):
            manager.unregister(name=candidate.name)
        if isinstance(error, ContractError):
            raise
        raise _contract(candidate, f"{type(error).__name__}: {error}", "") from error


def _refuse_misspelt(manager: pluggy.PluginManager, candidate: Candidate, plugin: object) -> None:
    process = _process(candidate)
    names = _names(HOOKSPECS[process])
    hooks = {hook.name: hook for hook in manager.get_hookcallers(plugin) or ()}
    unknown = [
        name
        for name, hook in hooks.items()
        if not hook.has_spec() and any(i.plugin is plugin and not i.optionalhook for i in hook.get_hookimpls())
    ]
    if not unknown:
        return
    elsewhere = [p for p, spec in HOOKSPECS.items() if p != process and hasattr(spec, unknown[0])]
    hint = did_you_mean(unknown[0], names) or f"the hooks of this process are: {', '.join(names)}"
    if elsewhere:
        hint = f"it is a hook of {elsewhere[0]}: register the plugin in engine.hooks.{elsewhere[0]}.v0"
    found = f"it implements {', '.join(repr(u) for u in unknown)}, which is no hook of {process}"
    raise _contract(candidate, found, hint)


def _refuse_what_is_no_plain_call(manager: pluggy.PluginManager, plugin: object) -> None:
    """Raise TypeError where the plugin wraps a hook, or implements one by a coroutine, which nobody would await."""
    for hook in manager.get_hookcallers(plugin) or ():
        for implementation in hook.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if implementation.wrapper or implementation.hookwrapper:
                raise TypeError(f"it wraps {hook.name}: hooks are resolved to plain calls and cannot be wrapped")
            if inspect.iscoroutinefunction(implementation.function):
                raise TypeError(f"its {hook.name} is a coroutine function: hooks are plain functions")


def _contract(candidate: Candidate, found: str, remedy: str) -> ContractError:
    return ContractError(
        f"use plugin '{candidate.name}' for {candidate.point}",
        f"{found} ({candidate.value} of {candidate.provenance})",
        remedy or f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}",
        **candidate.blame,
    )
