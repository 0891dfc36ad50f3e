"""Questions, answers and news between two processes of a server; here both ends are in one."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from engine.types.errors import ConfigError, EngineDeadError, EngineError
from engine_server.processes.channel import Channel


def test_questions_answers_and_news() -> None:
    async def run() -> None:
        heard: list[Any] = []
        ended: list[str] = []
        hold = asyncio.Event()

        async def slow(value: int) -> int:
            await hold.wait()
            return value + 1

        async def fail() -> None:
            raise ConfigError("do it", "it cannot be done", "leave it")

        handlers = {
            "note": heard.append,
            "twice": lambda value: value * 2,
            "slow": slow,
            "fail": fail,
            "bug": lambda: 1 / 0,
        }
        ours, its = socket.socketpair()
        here = Channel({}, lambda: ended.append("here"))
        there = Channel(handlers, lambda: ended.append("there"))
        await here.open(ours)
        await there.open(its)
        waiting = asyncio.ensure_future(here.ask("slow", 4))
        for size in (0, 10, 300_000):  # of which one needs several reads
            here.tell("note", b"x" * size)
        assert await here.ask("twice", "ab") == "abab", "others go on while one is answered"
        assert [len(data) for data in heard] == [0, 10, 300_000], "in the order in which it was said"
        with pytest.raises(ConfigError, match="it cannot be done"):
            await here.ask("fail")
        for unknown in ("bug", "nobody hears this"):
            with pytest.raises(EngineError, match="between API processes"):
                await here.ask(unknown)
        hold.set()
        assert await waiting == 5
        hold.clear()
        waiting = asyncio.ensure_future(here.ask("slow", 4))
        await asyncio.sleep(0.01)
        there.close()
        with pytest.raises(EngineDeadError):
            await waiting
        with pytest.raises(EngineDeadError):
            await here.ask("twice", 1)
        here.tell("note", b"")
        await asyncio.sleep(0.01)
        assert sorted(ended) == ["here", "there"]

    asyncio.run(run())
