"""What the engine does now, as the page shows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine_kit.prompt_sources import prompt_sources
from engine_playground.page_cells import summary

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo
    from engine_server.plugins import ServerView


async def live(server: ServerView, info: EngineInfo | None, refresh: float, cells: int) -> bytes:
    """What a page that looks every `refresh` seconds and draws up to `cells` cells is told, as JSON: `engine` and
    `drivers` as hooks were told, `stats` as the cores told last (counters since their start, so that the page takes the
    differences), `sources` the prompt tokens by where their keys and values came from, `pages` of each core now and how
    many of them requests retain, `time` on a clock that only grows.

    Raises EngineDeadError where the last core has died.
    """
    pages = await server.page_maps()
    stats = server.stats()
    told: dict[str, Any] = {} if info is None else msgspec.to_builtins(info)
    content = {
        "time": time.monotonic(),
        "refresh": refresh,
        "drivers": told.pop("drivers", []),
        "engine": told or None,
        "stats": stats,
        "sources": {} if stats is None else prompt_sources(stats),
        "pages": [
            summary(np.frombuffer(one.holders, np.uint8), np.frombuffer(one.cached, np.uint8), cells)
            | {"retained": sum(one.retained)}
            for one in pages
        ],
    }
    return msgspec.json.encode(content)
