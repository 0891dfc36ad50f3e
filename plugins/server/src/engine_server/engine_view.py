"""The engine as routes of hook plugins may look at it."""

from __future__ import annotations

import msgspec

from engine.embedding import AsyncLLM
from engine.types.outputs import StepStats
from engine.types.page_map import PageMap


class AsyncEngineView:
    """See `engine.interfaces.engine_view.EngineView`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def stats(self) -> StepStats | None:
        return self._llm.last_stats

    async def page_maps(self) -> list[PageMap]:
        return msgspec.convert(await self._llm.call("page_maps"), list[PageMap])
