"""Responses that are computed while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from engine_server.lifecycle import Lifecycle
from engine_server.limits import KeyUsage


class Background:
    """Belongs to one event loop. What runs here counts as a request in progress: for the server, which waits for it
    before it leaves, and for the API key.

    Args:
        lifecycle: the server's.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self, identity: str, work: Coroutine[Any, Any, None], usage: KeyUsage | None, ended: Callable[[], None]
    ) -> None:
        """Run `work`, which raises nothing.

        Args:
            identity: of the response.
            work: to be done.
            usage: of the API key that asks for it.
            ended: called when it has ended.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[identity] = task
        self._lifecycle.enter()
        if usage is not None:
            usage.hold()

        def done(_: asyncio.Task[None]) -> None:
            del self._tasks[identity]
            self._lifecycle.leave()
            if usage is not None:
                usage.leave()
            ended()

        task.add_done_callback(done)

    async def cancel(self, identity: str) -> bool:
        """Cancel it, and wait until it has ended; False where nothing of that id runs. It has always begun by then, so
        that it can tell of its end."""
        await asyncio.sleep(0)
        task = self._tasks.get(identity)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True
