"""The relay: hooks resolved, at start, to plain callables.

One pluggy call costs microseconds, a call of None nothing: `relay.step_done` is None where nobody listens, so callers
write

    if relay.step_done:
        relay.step_done(stats=stats)

pluggy keeps the order and checks the signatures; it is not in the way of a call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pluggy

from engine.plugin.discovery import Candidate, Registry, duplicate
from engine.plugin.hookspecs import HOOKSPECS
from engine.plugin.near import did_you_mean
from engine.types.errors import ContractError, PluginError

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""An observing implementation that has raised this often is not called again."""

Hook = Callable[..., None]


class HookRelay:
    """The hooks of one process. Each hook is an attribute: a callable that takes keywords, or None.

    Broken plugins (import fails, misspelt hook, wrong arguments) are put into the registry's quarantine and logged;
    they never end the start, because nobody asked for them by name.

    Args:
        process: "frontend", "core" or "worker".
        registry: what is installed.
        max_failures: after how many exceptions an implementation is disabled.

    Raises:
        DuplicateDriverError: two distributions register hook plugins under one name.
    """

    request_received: Hook | None
    step_done: Hook | None
    kv_events: Hook | None
    worker_started: Hook | None

    def __init__(self, process: str, registry: Registry, max_failures: int = MAX_FAILURES) -> None:
        self.process = process
        self.plugins: tuple[Candidate, ...] = ()
        spec = HOOKSPECS[process]
        names = [name for name in vars(spec) if not name.startswith("_")]
        manager = pluggy.PluginManager("engine")
        manager.add_hookspecs(spec)
        loaded = self._register(manager, registry)
        self._drop_misspelt(manager, registry, loaded, names)
        self.plugins = tuple(candidate for candidate in loaded.values() if candidate not in registry.quarantine)
        for name in names:
            setattr(self, name, self._resolve(name, manager, loaded, max_failures))

    def __repr__(self) -> str:
        heard = [name for name, hook in vars(self).items() if isinstance(hook, _Observers)]
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
                plugin = load_entry_point(candidate)
                if inspect.isclass(plugin):
                    plugin = plugin()
                manager.register(plugin, name=candidate.name)
                _refuse_wrappers(manager, plugin)
            except PluginError as error:
                _quarantine(registry, candidate, error)
            except Exception as error:
                if manager.has_plugin(candidate.name):
                    manager.unregister(name=candidate.name)
                _quarantine(registry, candidate, _contract(candidate, f"{type(error).__name__}: {error}", ""))
            else:
                loaded[candidate.name] = candidate
        return loaded

    def _drop_misspelt(
        self, manager: pluggy.PluginManager, registry: Registry, loaded: dict[str, Candidate], names: list[str]
    ) -> None:
        while True:
            try:
                return manager.check_pending()
            except pluggy.PluginValidationError as error:
                name = manager.get_name(error.plugin)
                assert name is not None
                unknown = [hook.name for hook in manager.get_hookcallers(error.plugin) or () if not hook.has_spec()]
                elsewhere = [p for p, spec in HOOKSPECS.items() if p != self.process and hasattr(spec, unknown[0])]
                hint = did_you_mean(unknown[0], names) or f"the hooks of this process are: {', '.join(names)}"
                if elsewhere:
                    hint = f"it is a hook of {elsewhere[0]}: register the plugin in engine.hooks.{elsewhere[0]}.v0"
                found = f"it implements {', '.join(repr(u) for u in unknown)}, which is no hook of {self.process}"
                _quarantine(registry, loaded[name], _contract(loaded[name], found, hint))
                manager.unregister(name=name)

    def _resolve(
        self, name: str, manager: pluggy.PluginManager, loaded: dict[str, Candidate], max_failures: int
    ) -> Hook | None:
        listeners = [
            _Listener(name, loaded[impl.plugin_name], impl.function, tuple(impl.argnames), max_failures)
            for impl in reversed(getattr(manager.hook, name).get_hookimpls())
        ]
        if not listeners:
            return None
        return _Observers(listeners, lambda: setattr(self, name, None))


class _Listener:
    """One implementation of an observing hook, with the count of its failures."""

    def __init__(
        self, hook: str, candidate: Candidate, function: Callable[..., object], arguments: tuple[str, ...], limit: int
    ) -> None:
        self.hook, self.candidate, self.function, self.arguments, self.limit = (
            hook, candidate, function, arguments, limit
        )  # fmt: skip
        self.failures = 0

    def __call__(self, values: dict[str, Any]) -> bool:
        """Call it; False once it has failed so often that it is to be dropped."""
        try:
            self.function(*[values[argument] for argument in self.arguments])
        except Exception:
            self.failures += 1
            who = f"hook {self.hook} of plugin '{self.candidate.name}' ({self.candidate.provenance})"
            if self.failures >= self.limit:
                logger.exception("%s raised for the %dth time and is disabled", who, self.failures)
                return False
            logger.warning("%s raised (%d of %d)", who, self.failures, self.limit, exc_info=self.failures == 1)
        return True


class _Observers:
    """All implementations of an observing hook, in the order of their calls."""

    def __init__(self, listeners: list[_Listener], on_silence: Callable[[], None]) -> None:
        self._listeners, self._on_silence = listeners, on_silence

    def __call__(self, **values: Any) -> None:
        failed = [listener for listener in self._listeners if not listener(values)]
        if failed:
            self._listeners = [listener for listener in self._listeners if listener not in failed]
            if not self._listeners:
                self._on_silence()


def _refuse_wrappers(manager: pluggy.PluginManager, plugin: object) -> None:
    """Raise TypeError where the plugin wraps a hook: an observing hook has no result to wrap."""
    for hook in manager.get_hookcallers(plugin) or ():
        for implementation in hook.get_hookimpls():
            if implementation.plugin is plugin and (implementation.wrapper or implementation.hookwrapper):
                raise TypeError(f"it wraps {hook.name}, which is an observing hook and cannot be wrapped")


def _contract(candidate: Candidate, found: str, remedy: str) -> ContractError:
    return ContractError(
        f"use hook plugin '{candidate.name}'",
        f"{found} ({candidate.value} of {candidate.provenance})",
        remedy or f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}",
        point=candidate.point,
        driver=candidate.name,
        distribution=candidate.provenance,
    )


def _quarantine(registry: Registry, candidate: Candidate, error: PluginError) -> None:
    registry.quarantine[candidate] = error
    logger.warning("a hook plugin is broken and left out: %s", error)
