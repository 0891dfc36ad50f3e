"""When a process is taken for hung."""

from __future__ import annotations

import asyncio

from engine.types.errors import EngineDeadError
from engine_server.processes.api_process import until_silent


async def test_one_that_stops_to_answer() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0 if asked < 4 else 60)

    began = asyncio.get_running_loop().time()
    assert await until_silent(ask, 0.2)
    assert asked == 4 and asyncio.get_running_loop().time() - began >= 0.2
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "the question that nobody answers is given up"


async def test_slow_answers_are_signs_of_life_and_who_has_gone_is_not_silent() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.1)
        if asked == 3:
            raise EngineDeadError("ask", "it has ended")

    assert not await until_silent(ask, 0.4) and asked == 3
