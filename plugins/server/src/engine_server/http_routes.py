"""For plugins that add routes to the server, by the hook `http_routes`: what they may ask, and pages for everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.types.kv import PageMap
from engine.types.outputs import StepStats

if TYPE_CHECKING:
    from engine.embedding import AsyncLLM

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class EngineView:
    """The engine of a server, to look at. From the event loop's thread."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def stats(self) -> StepStats | None:
        """What the engine cores told last, as of one core; None before the first step. Free."""
        return self._llm.last_stats

    async def page_maps(self) -> list[PageMap]:
        """The pages of each engine core that lives, in the order of their ranks, copied between two steps: some
        microseconds of the core's time for each 10,000 pages.

        Raises:
            EngineDeadError: the last core has died.
        """
        return msgspec.convert(await self._llm.call("page_maps"), list[PageMap])


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
