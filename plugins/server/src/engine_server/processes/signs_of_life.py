"""Whether a process that lives still answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from engine.types.errors import EngineError

ASK_SECONDS = 1.0
"""Between a question and the next, at most; and how exactly silence is measured."""


async def until_silent(ask: Callable[[], Awaitable[object]], seconds: float) -> bool:
    """Ask again and again, until no answer comes for so many seconds: True; or until asking fails: False.

    Silence is counted in the waits of this process, not by a clock: one that was itself stopped for a while, with all
    others, takes nobody for hung.
    """
    pause = min(ASK_SECONDS, seconds / 4)
    while True:
        answer = asyncio.ensure_future(ask())
        try:
            silence = 0.0
            while not answer.done():
                if silence >= seconds:
                    return True
                await asyncio.wait((answer,), timeout=pause)
                silence += pause
            answer.result()
        except EngineError:
            return False
        finally:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                if answer.done():
                    answer.exception()
        await asyncio.sleep(pause)
