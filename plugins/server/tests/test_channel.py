"""Questions, answers and news between two processes of a server; here both ends are in one."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from engine.process import wire
from engine.types.errors import ConfigError, EngineDeadError, EngineError
from engine_server.processes.channel import Channel, Message


class Way:
    """From one end to the other, as it is encoded, a turn of the loop later."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.other: Channel

    def send(self, message: Message) -> None:
        self.waiting.append(wire.encode(message))
        asyncio.get_running_loop().call_soon(lambda: self.other.hear(DECODER.decode(self.waiting.popleft())))


DECODER = wire.decoder(Message)


async def test_questions_answers_and_news() -> None:
    heard: list[Any] = []
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
    out, back = Way(), Way()
    here, there = Channel({}, out.send), Channel(handlers, back.send)
    out.other = there
    back.other = here
    waiting = asyncio.ensure_future(here.ask("slow", 4))
    for size in (0, 10, 300):
        here.tell("note", b"x" * size)
    assert await here.ask("twice", "ab") == "abab", "others go on while one is answered"
    assert [len(data) for data in heard] == [0, 10, 300], "in the order in which it was said"
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
    here.end()
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await here.ask("twice", 1)
    here.tell("note", b"")
    there.end()
    hold.set()
    await asyncio.sleep(0.01)
    assert len(heard) == 3 and not back.waiting and not out.waiting, "nothing is sent to what has gone"
