"""Where chat templates run: they change nothing, reach nothing but plain data, and do not run for ever.

jinja's sandbox keeps them from Python's inside. Here the time is watched too, at every call and every turn of a loop,
which is where a template can spend it; and what would take memory without end is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10.0
"""For one conversation. The longest that models take are rendered in a part of that."""
LARGEST = 10_000_000
"""Elements of a repeated text or list, bits of a power."""

_WATCHED = "engine: watched"


class TemplateTimeoutError(jinja2.TemplateError):
    """A template was not done in time."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment in which rendering ends.

    Args:
        seconds: for one rendering.
        **options: jinja's.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *, seconds: float = SECONDS, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._local = threading.local()  # templates are rendered on several threads at once
        self.filters[_WATCHED] = lambda iterable: _Watched(iterable, self.look)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment. Raises TemplateTimeoutError, and whatever templates raise."""
        self._local.deadline = time.monotonic() + self._seconds
        return template.render(variables)

    def look(self) -> None:
        """Raise TemplateTimeoutError where the time is over."""
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise TemplateTimeoutError(f"it was not done after {self._seconds:g} s")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of a function, method or macro; see jinja2."""
        self.look()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        else:
            long, times = (left, right) if hasattr(left, "__len__") else (right, left)
            size = len(long) * times if hasattr(long, "__len__") and isinstance(times, int) else 0
        if size > LARGEST:
            raise SecurityError(f"the template makes a value of {size} elements")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _WATCHED, [], [], None, None, lineno=loop.lineno)
        return tree


class _Watched:
    """What a loop goes through."""

    def __init__(self, iterable: Iterable[Any], look: Any) -> None:
        self._iterable = iterable
        self._look = look

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._look()
            yield item

    def __len__(self) -> int:  # for `loop.length`; without one jinja makes a list
        return len(self._iterable)  # type: ignore[arg-type]
