"""The marks of a hook's specification and of its implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import pluggy

Specification = TypeVar("Specification", bound=Callable[..., Any])

Kind = Literal["observing", "check", "chain", "filter", "wrap"]
"""What a hook does: "observing" listens, all others decide.

- `check`: each implementation may raise; what it returns is dropped.
- `chain`: each gets, as the first argument, the text that the one before returned; None leaves it as it is.
- `filter`: each may return a callable, which then filters one sequence's text, in that order.
- `wrap`: each returns the application that takes the place of the one it was given; the first called is the outermost.
"""

hookimpl = pluggy.HookimplMarker("engine")
"""Marks a function as the implementation of the hook of its name (`tryfirst=True`, `trylast=True` order it)."""

_hookspec = pluggy.HookspecMarker("engine")


def observing(function: Specification) -> Specification:
    """Mark a hook that listens: an implementation that raises is disabled after some failures."""
    return _marked(function, "observing")


def deciding(kind: Kind) -> Callable[[Specification], Specification]:
    """Mark a hook that decides about requests: where an implementation raises, the request is refused."""
    return lambda function: _marked(function, kind)


def kind_of(specification: Callable[..., Any]) -> Kind:
    """What a marked hook does."""
    kind: Kind = specification.engine_kind  # type: ignore[attr-defined]
    return kind


def _marked(function: Specification, kind: Kind) -> Specification:
    function.engine_kind = kind  # type: ignore[attr-defined]
    return _hookspec(function)
