"""What every process that serves does alike: where it stands between its start and its end, how requests in progress
may finish, what it says, which loop it runs."""

from __future__ import annotations

import asyncio
import enum
import gc
import os
from collections.abc import Callable, Coroutine
from typing import Any

from engine.types.errors import ShuttingDownError
from engine_kit.async_llm import AsyncLLM
from engine_kit.logs import tell

ACCESS_LOG = "engine.access"
"""The name of the access log."""
ENDED_AS = "ended_as"
"""In a request's state: the status that says how an answer ended whose status had been sent before."""
FAREWELL_SECONDS = 1
"""How long answers that were cut off get to reach their clients."""
LOOK_SECONDS = 2.0
"""How often it is looked whether a file has changed."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are when Python looks for garbage; its own 700 are made by a step of a few streams."""


class Phase(enum.Enum):
    """What the server does with a new request: only in `SERVING` it is taken."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Lifecycle:
    """Belongs to one event loop.

    Attributes:
        phase: as of now.
        active: requests that were let in and whose answers have not ended.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request was let in."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its answer has ended, however it did."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()


async def drain(
    llm: AsyncLLM, lifecycle: Lifecycle, timeout: float, at_once: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Refuse new requests, wait for those in progress (`timeout` seconds at most, and only until `at_once` is set), cut
    off what is left."""
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


def say(text: str) -> None:
    """Tell the operator."""
    tell("engine.server", text, f"engine: {text}")


def state_of_files(*paths: str | None) -> tuple[int, ...]:
    """What changes with files, also where a link exchanges one, as with mounted secrets; () where one is missing."""
    state: list[int] = []
    for path in filter(None, paths):
        try:
            found = os.stat(path)
        except OSError:
            return ()
        state += (found.st_mtime_ns, found.st_size, found.st_ino)
    return tuple(state)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (it is not made for Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def spare_the_collector() -> None:
    """What stands now stands until the end: collections need not look at it. And a step's news, which are many objects
    and gone a moment later, are no reason for one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
