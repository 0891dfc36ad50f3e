"""Runs what takes the longer the longer a text is beside an event loop: what `AsyncLLM` tokenises with."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONG = 16384
"""Characters (or messages, times 256) from which a prompt is tokenised in a thread: below, that takes a few
milliseconds at most, which other streams do not notice."""
HUGE = 2**20
"""Characters from which a tokenizer takes hundreds of bytes for each, until it is done."""


class LongPrompts:
    """Runs what tokenises or renders texts. To be used in one event loop."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    async def run(self, work: Callable[[], T], length: int) -> T:
        """The answer of `work`, on so many characters."""
        if length < LONG:
            return work()
        if length < HUGE:
            return await asyncio.to_thread(work)
        await self._alone.acquire()
        working = asyncio.ensure_future(asyncio.to_thread(_then_give_back, work))
        working.add_done_callback(lambda _: self._alone.release())
        return await asyncio.shield(working)  # who gives up ends no thread: the next one waits for it all the same


def _then_give_back(work: Callable[[], T]) -> T:
    """The C library keeps what a thread frees for what it may ask for next: after 8 MB of text more than half a GB."""
    try:
        return work()
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
