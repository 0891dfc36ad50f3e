"""Hearing an engine core in an event loop: a turn for each message, and every way in which a core can end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq

from engine.frontend import loop_listener
from engine.frontend.loop_listener import LoopListener
from engine.types import wire
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Beat, Failed, FromCore, Reply


class Core:
    """A core's end and the frontend's, in one process."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outputs, self._sender = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.outputs.bind("inproc://core")
        self._sender.connect("inproc://core")
        self.decode = wire.decoder(FromCore).decode
        self.stopping, self.has_ended = threading.Event(), False
        self.heard: list[list[FromCore]] = []
        self.deaths: list[EngineError] = []

    def tell(self, *messages: FromCore) -> None:
        for message in messages:
            self._sender.send(wire.encode(message))

    def tell_bytes(self, data: bytes) -> None:
        self._sender.send(data)

    def take(self, messages: Sequence[FromCore]) -> None:
        self.heard.append(list(messages))

    def ended(self) -> bool:
        return self.has_ended

    def why_ended(self) -> EngineError:
        return EngineDeadError("ended", threading.current_thread().name)

    def end_hung(self) -> EngineError:
        return EngineDeadError("hung", threading.current_thread().name)

    def end_unreadable(self, error: Exception) -> EngineError:
        return EngineDeadError("unreadable", str(error))

    @property
    def ids(self) -> list[list[int]]:
        return [[message.call_id for message in turn if isinstance(message, Reply)] for turn in self.heard]

    async def death(self) -> EngineError:
        async with asyncio.timeout(5):
            while not self.deaths:
                await asyncio.sleep(0.01)
        return self.deaths[0]


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.context.destroy(linger=0)


@asynccontextmanager
async def listening(core: Core, timeout: float = 60.0) -> AsyncIterator[LoopListener]:
    listener = LoopListener(core, asyncio.get_running_loop(), core.take, core.deaths.append, timeout)
    try:
        yield listener
    finally:
        listener.stop()


async def test_each_message_has_a_turn_of_its_own(core: Core) -> None:
    core.tell(*(Reply(i) for i in range(5)))  # what came before it listens is heard too
    async with listening(core):
        turns = 0
        while len(core.heard) < 5 and turns < 50:
            before = len(core.heard)
            await asyncio.sleep(0)
            turns += 1
            assert len(core.heard) <= before + 1, "who reads a stream has had no chance to read"
        assert core.ids == [[0], [1], [2], [3], [4]]
        core.tell(Beat(), Reply(9))
        await asyncio.sleep(0.1)
        assert core.ids[5:] == [[9]]


async def test_a_loop_that_is_behind_takes_several_at_once(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_listener, "BEHIND_SECONDS", -1.0)
    async with listening(core):
        core.tell(*(Reply(i) for i in range(40)))
        await asyncio.sleep(0.2)
    assert [len(turn) for turn in core.ids] == [16, 16, 8]
    assert [i for turn in core.ids for i in turn] == list(range(40))


async def test_a_process_that_ended_is_noticed_and_its_reason_found_beside_the_loop(core: Core) -> None:
    async with listening(core):
        core.has_ended = True
        error = await core.death()
    assert (error.asked, error.found) == ("ended", "core-end")
    assert len(core.deaths) == 1


async def test_a_silent_core_is_hung_and_one_that_beats_is_not(core: Core) -> None:
    async with listening(core, timeout=0.35):
        for _ in range(6):
            core.tell(Beat())
            await asyncio.sleep(0.1)
        assert not core.deaths
        assert (await core.death()).asked == "hung"


async def test_an_unreadable_message_comes_after_what_could_be_read(core: Core) -> None:
    async with listening(core):
        core.tell(Reply(1))
        core.tell_bytes(b"\xc1")
        core.tell(Reply(2))
        assert (await core.death()).asked == "unreadable"
        await asyncio.sleep(0.05)
    assert core.ids == [[1]], "nothing is heard of it afterwards"


async def test_a_core_that_says_why_it_ends(core: Core) -> None:
    async with listening(core):
        core.tell(Reply(1), Failed(("engine_dead", "asked", "found", "")), Reply(2))
        assert (await core.death()).found == "found"
    assert core.ids == [[1]]


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_after_stop_nothing_is_heard(core: Core, elsewhere: bool) -> None:
    async with listening(core) as listener:
        if elsewhere:
            await asyncio.to_thread(listener.stop)
        else:
            listener.stop()
        core.tell(Reply(1))
        core.has_ended = True
        await asyncio.sleep(0.3)
    assert not core.heard and not core.deaths


def test_stop_once_the_loop_has_closed(core: Core) -> None:
    made: list[LoopListener] = []

    async def listen() -> None:
        made.append(LoopListener(core, asyncio.get_running_loop(), core.take, core.deaths.append, 60.0))

    asyncio.run(listen())
    made[0].stop()
