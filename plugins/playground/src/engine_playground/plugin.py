"""The hooks, and the plugin's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.plugin import hookimpl

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo
    from engine_server.plugins import ServerView


class PlaygroundOptions(BaseModel):
    """Set as `--hooks.playground.NAME VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(default=True, description="whether the page is served")
    refresh: Annotated[float, Field(ge=0.2, le=60)] = Field(
        default=1.0, description="seconds from one look at the engine to the next, while a page is open and in sight"
    )
    cells: Annotated[int, Field(ge=64, le=16384)] = Field(
        default=2048,
        description="most cells of the map of the KV cache; where there are more pages, several share a cell",
    )


class Playground:
    """Serves the page, and the data that it shows. Switched off, it implements no hook, and costs nothing."""

    Options = PlaygroundOptions

    def __init__(self, options: PlaygroundOptions) -> None:
        self._options = options
        self._info: EngineInfo | None = None
        if not options.enabled:
            silent: dict[str, Any] = dict.fromkeys(("engine_started", "http_routes"))
            vars(self).update(silent)

    @hookimpl
    def engine_started(self, info: EngineInfo) -> None:
        """Keep what the page says of the engine."""
        self._info = info

    @hookimpl
    def http_routes(self, router: Any, server: ServerView) -> None:
        """Add the page and its files, which need no key, and the live data, which need one where the server asks."""
        from engine_playground.routes import add

        add(router, server, self._options.refresh, self._options.cells, lambda: self._info)
