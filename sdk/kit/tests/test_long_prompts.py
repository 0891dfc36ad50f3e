"""Work on long texts beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from engine_kit.long_prompts import HUGE, LONG, LongPrompts


async def test_short_here_long_beside() -> None:
    long = LongPrompts()
    assert await long.run(threading.get_ident, LONG - 1) == threading.get_ident()
    for length in (LONG, HUGE):
        assert await long.run(threading.get_ident, length) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await long.run(lambda: 1 // 0, length)


@pytest.mark.parametrize(("length", "most"), [(LONG, 3), (HUGE, 1)])
async def test_huge_ones_one_by_one(length: int, most: int) -> None:
    long, at_once, seen = LongPrompts(), 0, 0
    all_there = threading.Barrier(most)

    def work() -> None:
        nonlocal at_once, seen
        at_once += 1
        seen = max(seen, at_once)
        all_there.wait(10)
        time.sleep(0.01)
        at_once -= 1

    await asyncio.gather(*(long.run(work, length) for _ in range(3)))
    assert seen == most


async def test_a_huge_one_that_nobody_waits_for_keeps_its_turn_until_it_is_done() -> None:
    long, begun, may_end = LongPrompts(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)

    given_up = asyncio.create_task(long.run(work, HUGE))
    await asyncio.to_thread(begun.wait, 10)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    later = asyncio.create_task(long.run(may_end.is_set, HUGE))
    await asyncio.sleep(0.01)
    may_end.set()
    assert await later, "it ran beside the one before it"
