"""What a hook becomes at start: a plain callable over its implementations, in order. One class a kind of hook."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.types.errors import HookFailedError, RequestRefusedError

if TYPE_CHECKING:
    from engine.plugin.candidate import Candidate

logger = logging.getLogger("engine.plugin.hooks")

FailureCounts = tuple[tuple[str, str, int], ...]
"""(plugin, hook, how often it raised): as it travels."""


class Failures(Counter[tuple[str, str]]):
    """By (plugin, hook): how often an implementation raised."""

    def told(self) -> FailureCounts:
        """As it travels."""
        return tuple((plugin, hook, count) for (plugin, hook), count in self.items())


def sum_failures(several: Iterable[FailureCounts]) -> FailureCounts:
    """The counts of several processes as one."""
    total = Failures()
    for told in several:
        for plugin, hook, count in told:
            total[plugin, hook] += count
    return total.told()


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
        return HookFailedError(
            f"decide about a request with {self.who}",
            f"it raised {type(error).__name__}",
            "the log of the engine has the details; mend the plugin, or uninstall it",
        )

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
