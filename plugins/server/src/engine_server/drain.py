"""The end of a server's life: what is in progress may finish, for a time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from engine.embedding import AsyncLLM
from engine.types.errors import ShuttingDownError
from engine_server.lifecycle import Lifecycle, Phase

FAREWELL_SECONDS = 1
"""How long answers that were cut off get to reach their clients."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are when Python looks for garbage; its own 700 are made by a step of a few streams."""


async def drain(
    llm: AsyncLLM, lifecycle: Lifecycle, timeout: float, at_once: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Refuse new requests, wait for those in progress, cut off what is left.

    Args:
        llm: the engine.
        lifecycle: of the server.
        timeout: seconds to wait.
        at_once: set where nobody wants to wait any longer.
        say: tells the operator.
    """
    lifecycle.phase = Phase.DRAINING
    if lifecycle.active:
        say(f"finishing {lifecycle.active} requests, for {timeout:g} s at most; a second signal ends them at once")
        await first(timeout, lifecycle.idle(), at_once.wait())
    if lifecycle.active:
        say(f"cutting off {lifecycle.active} requests")
        llm.end_all(ShuttingDownError("a request in progress", "the server was stopped", "send it again"))
        await first(FAREWELL_SECONDS, lifecycle.idle())


async def first(timeout: float, *events: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these coroutines has ended, `timeout` seconds at most; the others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def spare_the_collector() -> None:
    """What stands now stands until the end: collections need not look at it. And a step's news, which are many objects
    and gone a moment later, are no reason for one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
