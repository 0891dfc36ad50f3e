"""Hearing an engine core in an event loop: a turn for each message, and every way in which a core can end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.process.wire import Inbox, Outbox
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Failed, FromCore, Reply
from engine_kit import process_client
from engine_kit.process_client import LoopListener


class Core:
    """A core's end and the frontend's, in one process. See `engine_kit.process_client.CoreEnd`."""

    def __init__(self, folder: Path) -> None:
        self._inbox: Inbox[FromCore] = Inbox(FromCore, f"ipc://{folder}/outputs")
        self._outbox = Outbox(f"ipc://{folder}/outputs")
        self.stopping = threading.Event()
        self.failed = False
        self.has_ended = False
        self.heard: list[list[FromCore]] = []
        self.deaths: list[EngineError] = []

    def tell(self, *messages: FromCore) -> None:
        for message in messages:
            self._outbox.put(message)

    def hear(self, messages: Sequence[FromCore]) -> None:
        self.heard.append(list(messages))

    def close(self) -> None:
        self._inbox.close()
        self._outbox.drop()

    def fileno(self) -> int:
        return self._inbox.fileno()

    def take(self) -> FromCore | None:
        message = None if self.failed else self._inbox.take()
        if not isinstance(message, Failed):
            return message
        self.failed = True
        return None

    def lost(self) -> bool:
        return self.has_ended

    def death(self) -> EngineError:
        return EngineDeadError("failed" if self.failed else "ended", threading.current_thread().name)

    @property
    def ids(self) -> list[list[int]]:
        return [[message.call_id for message in turn if isinstance(message, Reply)] for turn in self.heard]

    async def death_told(self) -> EngineError:
        async with asyncio.timeout(5):
            while not self.deaths:
                await asyncio.sleep(0.01)
        return self.deaths[0]


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core(tmp_path)
    core.tell(Reply(-1))
    while core.take() is None:  # connected
        pass
    yield core
    core.close()


@asynccontextmanager
async def listening(core: Core) -> AsyncIterator[LoopListener]:
    listener = LoopListener(core, asyncio.get_running_loop(), core.hear, core.deaths.append)
    try:
        yield listener
    finally:
        listener.stop()


async def test_each_message_has_a_turn_of_its_own(core: Core) -> None:
    core.tell(*(Reply(i) for i in range(5)))  # what came before it listens is heard too
    async with listening(core), asyncio.timeout(10):
        while len(core.heard) < 5:
            before = len(core.heard)
            await asyncio.sleep(0)
            assert len(core.heard) <= before + 1, "who reads a stream has had no chance to read"
        assert core.ids == [[0], [1], [2], [3], [4]]
        core.tell(Reply(9))
        while len(core.heard) < 6:
            await asyncio.sleep(0)
        assert core.ids[5:] == [[9]]


async def test_a_loop_that_is_behind_takes_several_at_once(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "BEHIND_SECONDS", -1.0)
    core.tell(*(Reply(i) for i in range(40)))
    await asyncio.sleep(0.2)  # they come, one by one, and nobody listens yet
    async with listening(core), asyncio.timeout(10):
        while sum(map(len, core.heard)) < 40:
            await asyncio.sleep(0)
    assert max(len(turn) for turn in core.ids) == 16, "as many as there are, and no more than that"
    assert [i for turn in core.ids for i in turn] == list(range(40))


async def test_a_process_that_ended_is_noticed_and_its_reason_found_beside_the_loop(core: Core) -> None:
    async with listening(core):
        core.has_ended = True
        error = await core.death_told()
    assert (error.asked, error.found) == ("ended", "core-end")
    assert len(core.deaths) == 1


async def test_a_core_that_fails_is_heard_up_to_then(core: Core) -> None:
    async with listening(core):
        core.tell(Reply(1), Failed(("engine_dead", "asked", "found", "")), Reply(2))
        assert (await core.death_told()).asked == "failed"
        await asyncio.sleep(0.05)
    assert core.ids == [[1]], "nothing is heard of it afterwards"


async def test_its_failure_is_told_though_nobody_could_take_in_what_came_before(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "BEHIND_SECONDS", -1.0)  # both are taken at once
    monkeypatch.setattr(core, "hear", lambda messages: 1 // 0)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with listening(core):
        core.tell(Reply(1), Failed(("engine_dead", "asked", "found", "")))
        time.sleep(0.2)
        assert (await core.death_told()).asked == "failed"


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
        made.append(LoopListener(core, asyncio.get_running_loop(), core.hear, core.deaths.append))

    asyncio.run(listen())
    made[0].stop()
