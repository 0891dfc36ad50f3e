"""Work on long texts: in a thread beside the event loop; on huge ones one by one, and their memory is given back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from functools import partial
from typing import TypeVar

LONG = 16384
"""Characters (or messages, times 256) from which a prompt is tokenised in a thread: below, that takes a few
milliseconds at most, which other streams do not notice."""
HUGE = 2**20
"""Characters from which a tokenizer takes hundreds of bytes for each, until it is done."""
T = TypeVar("T")


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
        async with self._alone:
            return await asyncio.to_thread(partial(_then_give_back, work))


def _then_give_back(work: Callable[[], T]) -> T:
    """The C library keeps what a thread frees for what it may ask for next: after 8 MB of text more than half a GB."""
    try:
        return work()
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
