"""What the first process and an API process say to each other, by `engine.process`: questions with answers, and news,
both ways. What is sent is heard in the order in which it was sent."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from engine.types.errors import EngineDeadError, EngineError, rebuild_error
from engine.types.messages import Shutdown
from engine.types.start import CoreStart

log = logging.getLogger("engine.server")

Handler = Callable[..., Any]
"""Takes what was sent; a coroutine's answer is sent when it has ended."""


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an API process is started with.

    Args:
        number: of the process, from 0 on; one that comes in a dead one's place has the same.
        client: its number for the cores, which nobody had before.
        core: what the cores were started with.
        num_cores: how many they are.
        config: the engine's settings as JSON, those that were set.
        settings: the server's, likewise.
        listener: the descriptor of the listening socket, which it inherits.
        asks_for_key: whether clients need one.
        replaces: it comes in a dead one's place, beside others that serve: it listens when it can serve, and until then
            no connection is given to it. Without that it listens as soon as it has the keys, so that probes learn that
            the model loads.
    """

    number: int
    client: int
    core: CoreStart
    num_cores: int
    config: str
    settings: str
    listener: int
    asks_for_key: bool
    replaces: bool = False


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """News."""

    name: str
    values: Any


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question."""

    number: int
    name: str
    values: Any


class Reply(msgspec.Struct, frozen=True, tag="answer"):
    """To the question of this number; the parts of an error in place of a value."""

    number: int
    value: Any = None
    error: tuple[str, str, str, str] | None = None


Message = Tell | Ask | Reply
ToApiProcess = Tell | Ask | Reply | Shutdown


class Channel:
    """One end, in one event loop: `handlers`, by name, hear the other end; `send` sends it a message, and never
    blocks."""

    def __init__(self, handlers: Mapping[str, Handler], send: Callable[[Message], None]) -> None:
        self._handlers = handlers
        self._send = send
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._gone = False

    def tell(self, name: str, *values: Any) -> None:
        """Send news. What has gone hears nothing."""
        if not self._gone:
            self._send(Tell(name, values))

    async def ask(self, name: str, *values: Any) -> Any:
        """Send a question, and wait for its answer, as plain data.

        Raises what the other end's handler raised, if that was an EngineError; EngineDeadError where it has gone.
        """
        if self._gone:
            raise _gone()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, name, values))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def end(self) -> None:
        """The other end has gone."""
        self._gone = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(_gone())
        for task in self._answering:
            task.cancel()

    def hear(self, message: Message) -> None:
        """The other end has sent this."""
        if isinstance(message, Reply):
            answer = self._asked.get(message.number)
            if answer is not None and not answer.done():
                if message.error is None:
                    answer.set_result(message.value)
                else:
                    answer.set_exception(rebuild_error(message.error))
            return
        try:
            result = self._handlers[message.name](*message.values)
        except Exception as error:
            return self._fail(message, error)
        if inspect.iscoroutine(result):
            task = asyncio.get_running_loop().create_task(self._finish(message, result))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif isinstance(message, Ask):
            self._send(Reply(message.number, result))

    async def _finish(self, message: Tell | Ask, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except Exception as error:
            return self._fail(message, error)
        if isinstance(message, Ask) and not self._gone:
            self._send(Reply(message.number, result))

    def _fail(self, message: Tell | Ask, error: Exception) -> None:
        if not isinstance(error, EngineError):
            log.error("%r between API processes failed", message.name, exc_info=error)
            error = EngineError(f"{message.name} between API processes", f"{type(error).__name__}: {error}")
        if isinstance(message, Ask) and not self._gone:
            self._send(Reply(message.number, error=error.parts))


def _gone() -> EngineDeadError:
    return EngineDeadError("ask another process of the server", "it has ended", "send the request again")
