"""The mark of a route that everybody may get, without an API key: what a browser asks for before it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def without_key(endpoint: Endpoint) -> Endpoint:
    """Mark the function of a route that a hook plugin adds: it is served to everybody, also while the model loads, and
    counts in no key's limits. For files that hold nothing secret, such as a page and its scripts; nothing that asks
    the engine for anything belongs there. The route takes GET (and HEAD) alone and has no parameters in its path; a
    plugin that marks another is left out, with a warning. Above it stands the router's decorator:

        @router.get("/page.css")
        @without_key
        def style() -> Response: ...
    """
    endpoint.engine_without_key = True  # type: ignore[attr-defined]
    return endpoint


def is_without_key(endpoint: object) -> bool:
    """Whether a route's function bears the mark."""
    return getattr(endpoint, "engine_without_key", False) is True
