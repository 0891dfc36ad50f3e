"""An API process, as the first process sees it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.embedding import LoopListener
from engine.process.child import Child
from engine.types.errors import EngineError
from engine_server.metrics.gathering import Snapshot, Told
from engine_server.processes.channel import ApiStart, Channel, Handler, Message

MODULE = "engine_server.processes.child"
ANSWER_SECONDS = 1.0
"""How long a process may take to tell what it has counted; then what it told last counts."""
LEAVE_SECONDS = 2.0
"""How long a process gets to leave."""


class ApiProcess:
    """One of them: its process, its channel, and what it holds.

    Args:
        start: what it is started with.
        handlers: of what it asks and tells, by name; each gets this object first.
        silence: seconds without a sign of life after which it is ended.
        on_end: called once, with this object, when it has gone by itself.

    Attributes:
        up: it is ready to serve.
        error: why it has gone.
        held: by digest of API keys, its requests that are counted in.
        last: what it told last of what it has counted.
        began: when it was started, by a clock that only grows.

    Raises EngineDeadError where the system refuses to start it.
    """

    def __init__(
        self,
        start: ApiStart,
        handlers: Mapping[str, Handler],
        silence: float,
        on_end: Callable[[ApiProcess], None],
    ) -> None:
        self.number = start.number
        self.client = start.client
        self.up = asyncio.Event()
        self.error: EngineError | None = None
        self.held: Counter[bytes] = Counter()
        self.began = time.monotonic()
        self._on_end = on_end
        what = f"API process {start.number}"
        self._child: Child[Message] = Child(
            MODULE,
            start,
            Message,
            what=what,
            silence=silence,
            patience="--api-worker-timeout",
            pass_fds=(start.listener,),
        )
        self.last = Told(self.number, self.pid, 0, Snapshot())
        self.channel = Channel({name: self._bound(one) for name, one in handlers.items()}, self._child.send)
        self._ending = threading.Lock()  # whoever finds it dead, and whoever ends them all
        self._listener = LoopListener[Message](self._child, asyncio.get_running_loop(), self._hear, self._died)

    def _bound(self, handler: Handler) -> Handler:
        return lambda *values: handler(self, *values)

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.channel.hear(message)

    def _died(self, error: EngineError) -> None:
        self.error = error
        self.channel.end()
        self._on_end(self)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._child.pid

    def addresses(self, dp_rank: int, pid: int) -> tuple[str, str]:
        """Where it binds its sockets for a core; each core of a rank has others."""
        place = f"{dp_rank}-{pid}"
        requests, outputs = (f"ipc://{self._child.directory}/{name}-{place}" for name in ("requests", "outputs"))
        return requests, outputs

    async def drain(self) -> int:
        """Tell it to leave in order. Returns how many requests it still has; 0 where it does not answer."""
        if self.up.is_set():
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    count: int = await self.channel.ask("drain")
                    return count
        return 0

    async def renew(self) -> None:
        """Have it tell what it has counted; where it does not, what it told last counts on."""
        if self.up.is_set():
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    self.take(*await self.channel.ask("snapshot"))

    def take(self, active: int, snapshot: object) -> None:
        """It told what it has counted."""
        found = Snapshot() if snapshot is None else msgspec.convert(snapshot, Snapshot, strict=False)
        self.last = Told(self.number, self.pid, active, found)

    def hurry(self) -> None:
        """Have it leave at once."""
        self._child.ask_to_stop()

    async def end(self, seconds: float) -> None:
        """Wait until the process has ended, `seconds` at most, then end it. Idempotent."""
        await asyncio.to_thread(self._end, seconds)
        self.channel.end()

    def _end(self, seconds: float) -> None:
        with self._ending:
            self._child.wait(seconds)
            self._listener.stop()
            self._child.end(0)
            self._child.close()
