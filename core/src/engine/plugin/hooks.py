"""The relay: hooks resolved, at start, to plain callables.

One pluggy call costs microseconds, a call of None nothing: `relay.step_done` is None where nobody listens, so callers
write

    if relay.step_done:
        relay.step_done(stats=stats)

Hooks that decide are called alike, and raise where they refuse; each kind is a class below. pluggy keeps the order and
checks the signatures; it is not in the way of a call.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pluggy

from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry
from engine.plugin.hints import did_you_mean
from engine.plugin.hookspecs import HOOKSPECS, facts_of
from engine.plugin.loading import load_entry_point
from engine.plugin.options import HookOptions, build_options, plain
from engine.plugin.points import HOOKS
from engine.types.errors import ContractError, HookFailedError, PluginError, RequestRefusedError

logger = logging.getLogger(__name__)

MAX_FAILURES = 10
"""An observing implementation that has raised this often is not called again."""

Hook = Callable[..., None]


# -- what a hook becomes: a plain callable over its implementations ----------------------------------------------------
FailureCounts = tuple[tuple[str, str, int], ...]
"""(plugin, hook, how often it raised): as it travels."""


class Failures(Counter[tuple[str, str]]):
    """By (plugin, hook): how often an implementation raised."""

    def told(self) -> FailureCounts:
        """As it travels."""
        return tuple((plugin, hook, count) for (plugin, hook), count in self.items())


@dataclass(frozen=True, eq=False)
class Implementation:
    """One plugin's implementation of one hook.

    Attributes:
        hook: the hook's name.
        candidate: the plugin.
        function: what it implements it with.
        arguments: those that it takes.
        failures: where its failures are counted.
    """

    hook: str
    candidate: Candidate
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    failures: Failures

    @property
    def who(self) -> str:
        """For messages."""
        return f"hook {self.hook} of plugin '{self.candidate.name}' ({self.candidate.provenance})"

    def call(self, values: Mapping[str, Any]) -> Any:
        """Call it with those of the values that it takes; what it raises passes."""
        return self.function(*[values[argument] for argument in self.arguments])

    def count_failure(self) -> int:
        """One more failure; how many there were."""
        self.failures[self.candidate.name, self.hook] += 1
        return self.failures[self.candidate.name, self.hook]

    def failed(self, error: Exception) -> HookFailedError:
        """Count and log a failure of a hook that decides; the error that refuses the request."""
        self.count_failure()
        logger.error("%s failed, a request is refused", self.who, exc_info=error)
        asked, found = f"decide about a request with {self.who}", f"it raised {type(error).__name__}"
        return HookFailedError(asked, found, "the engine's log has the details; mend the plugin, or uninstall it")

    def decide(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function`, which is this implementation's. Raises RequestRefusedError as it does, and HookFailedError
        for any other exception."""
        try:
            return function(*arguments)
        except (RequestRefusedError, HookFailedError):
            raise
        except Exception as error:
            raise self.failed(error) from error


class Observers:
    """A hook that listens. An implementation that has raised `limit` times is not called again."""

    def __init__(self, all_: Iterable[Implementation], limit: int, on_silence: Callable[[], None]) -> None:
        self.listening = list(all_)
        self._limit = limit
        self._on_silence = on_silence

    def __call__(self, **values: Any) -> None:
        failed = [one for one in self.listening if not self._tell(one, values)]
        if failed:
            self.listening = [one for one in self.listening if one not in failed]
            if not self.listening:
                self._on_silence()

    def _tell(self, one: Implementation, values: Mapping[str, Any]) -> bool:
        try:
            one.call(values)
        except Exception:
            count = one.count_failure()
            if count >= self._limit:
                logger.exception("%s raised for the %dth time and is disabled", one.who, count)
                return False
            logger.warning("%s raised (%d of %d)", one.who, count, self._limit, exc_info=count == 1)
        return True


class Deciders:
    """A hook that decides: base of the four forms."""

    def __init__(self, all_: Iterable[Implementation]) -> None:
        self.deciding = tuple(all_)


class Checks(Deciders):
    """Calls all; the first that raises refuses."""

    def __call__(self, **values: Any) -> None:
        for one in self.deciding:
            one.decide(one.call, values)


class Chain(Deciders):
    """Passes the first value, a text, from one to the next, and returns what the last one made of it."""

    def __call__(self, **values: Any) -> str:
        first = next(iter(values))
        for one in self.deciding:
            text = one.decide(one.call, values)
            if text is not None:
                values[first] = _text(one, text)
        result: str = values[first]
        return result


class Filters(Deciders):
    """Asks all for a filter; their filters as one, or None where there is none."""

    def __call__(self, **values: Any) -> FilterChain | None:
        filters: list[tuple[Implementation, Callable[[str, bool], Any]]] = []
        for one in self.deciding:
            filter_ = one.decide(one.call, values)
            if filter_ is None:
                continue
            if not callable(filter_):
                raise one.failed(TypeError(f"it returned {filter_!r:.80}, which cannot be called"))
            filters.append((one, filter_))
        return FilterChain(filters) if filters else None


class FilterChain:
    """The filters of one sequence, in order."""

    def __init__(self, filters: Sequence[tuple[Implementation, Callable[[str, bool], Any]]]) -> None:
        self._filters = filters

    def __call__(self, text: str, last: bool) -> str:
        """What is to be shown of the next piece. Raises HookFailedError."""
        for one, filter_ in self._filters:
            try:
                text = _text(one, filter_(text, last))
            except HookFailedError:
                raise
            except Exception as error:  # a refusal comes too late here, and ends the sequence as any other exception
                raise one.failed(error) from error
            if not text and not last:
                break
        return text


class Wraps(Deciders):
    """Wraps an application, so that the first implementation is the outermost. How a failure is answered is the
    server's: it makes each layer with `guard(implementation, application)`, where the hook itself failed from None."""

    def __call__(self, app: Any, guard: Callable[[Implementation, Any, Any], Any], **values: Any) -> Any:
        for one in reversed(self.deciding):
            wrapped: Any = None
            try:
                wrapped = one.call({**values, "app": app})
                if not callable(wrapped):
                    raise TypeError(f"it returned {wrapped!r:.80}, which cannot be called")
            except Exception:
                one.count_failure()
                logger.exception("%s failed: every request is refused until it is mended or uninstalled", one.who)
                wrapped = None
            app = guard(one, wrapped, app)
        return app


def _text(one: Implementation, value: Any) -> str:
    if not isinstance(value, str):
        raise one.failed(TypeError(f"it returned {value!r:.80}, which is no text"))
    return value


DECIDERS: Mapping[str, type[Checks | Chain | Filters | Wraps]] = MappingProxyType(
    {"check": Checks, "chain": Chain, "filter": Filters, "wrap": Wraps}
)
"""By kind of hook; the kind "observing" has `Observers`."""


# -- the relay ---------------------------------------------------------------------------------------------------------
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
        self, process: str, registry: Registry, max_failures: int = MAX_FAILURES, options: HookOptions | None = None
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
    remedy = remedy or f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}"
    return candidate.error(ContractError, f"{found} ({candidate.value} of {candidate.provenance})", remedy)
