"""What routes of hook plugins may ask the engine behind them."""

from __future__ import annotations

from typing import Protocol

from engine.types.kv import PageMap
from engine.types.outputs import StepStats


class EngineView(Protocol):
    """The engine of a server, to look at. From the event loop's thread."""

    def stats(self) -> StepStats | None:
        """What the engine cores told last, as of one core; None before the first step. Free."""
        ...

    async def page_maps(self) -> list[PageMap]:
        """The pages of each engine core that lives, in the order of their ranks, copied between two steps: some
        microseconds of the core's time for each 10,000 pages.

        Raises:
            EngineDeadError: the last core has died.
        """
        ...
