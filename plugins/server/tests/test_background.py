"""What runs in the background counts until it has ended."""

from __future__ import annotations

import asyncio

from engine_server.keys import KeyLimits, OwnUsage
from engine_server.lifecycle import Lifecycle
from engine_server.responses.store import Background


def test_it_counts_until_it_has_ended() -> None:
    async def check() -> None:
        lifecycle, usage = Lifecycle(), OwnUsage(KeyLimits(max_concurrent_requests=1))
        background, go, ended = Background(lifecycle), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await go.wait()

        assert usage.enter() is None
        background.start("r", work(), usage, ended.set)
        usage.leave()  # the request that asked for it
        assert lifecycle.active == 1 and usage.enter() is not None
        go.set()
        await asyncio.wait_for(ended.wait(), 10)
        assert lifecycle.active == 0 and usage.enter() is None and not await background.cancel("r")

    asyncio.run(check())


def test_cancelled_at_any_time() -> None:
    async def check() -> None:
        lifecycle, ended, seen = Lifecycle(), [0], []
        background = Background(lifecycle)

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")

        def count() -> None:
            ended[0] += 1

        for wait in (False, True):
            background.start("r", work(), None, count)
            if wait:
                await asyncio.sleep(0)
            assert await background.cancel("r") and lifecycle.active == 0
        assert ended == [2] and seen == ["cancelled"] * 2, "it begins before it ends"

    asyncio.run(check())
