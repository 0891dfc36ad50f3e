"""An API process, as the first process sees it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from engine.process.child import Child
from engine.process.run import FAILED
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Beat
from engine.types.start import CoreStart
from engine_server.metrics.gathering import Snapshot, Told
from engine_server.processes.channel import Channel, Handler

ASK_SECONDS = 1.0
"""Between a question and the next, at most; and how exactly silence is measured."""


async def until_silent(ask: Callable[[], Awaitable[object]], seconds: float) -> bool:
    """Ask again and again, until no answer comes for so many seconds: True; or until asking fails: False.

    Silence is counted in the waits of this process, not by a clock: one that was itself stopped for a while, with all
    others, takes nobody for hung.
    """
    pause = min(ASK_SECONDS, seconds / 4)
    while True:
        answer = asyncio.ensure_future(ask())
        try:
            silence = 0.0
            while not answer.done():
                if silence >= seconds:
                    return True
                await asyncio.wait((answer,), timeout=pause)
                silence += pause
            answer.result()
        except EngineError:
            return False
        finally:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                if answer.done():
                    answer.exception()
        await asyncio.sleep(pause)


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one needs; see `engine_server.processes.child`.

    Args:
        number: of the process, from 0 on; one that comes in a dead one's place has the same.
        client: its number for the cores, which nobody had before.
        core: what the cores were started with.
        num_cores: how many they are.
        config: the engine's settings as JSON, those that were set.
        settings: the server's, likewise.
        listener, channel: descriptors that it inherits: the listening socket's, and the one's to the first process.
        asks_for_key: whether clients need one.
        replaces: it comes in a dead one's place, beside others that serve: it listens when it can serve, and until then
            no connection is given to it. Without that it listens at once, so that probes learn that the model loads.
    """

    number: int
    client: int
    core: CoreStart
    num_cores: int
    config: str
    settings: str
    listener: int
    channel: int
    asks_for_key: bool
    replaces: bool = False


MODULE = "engine_server.processes.child"
ANSWER_SECONDS = 1.0
"""How long a process may take to tell what it has counted; then what it told last counts."""
LEAVE_SECONDS = 2.0
"""How long a process whose channel has ended gets to end too."""


class ApiProcess:
    """One of them: its process, its channel, and what it holds.

    Args:
        number: from 0 on; one that comes in a dead one's place has the same.
        client: its number for the cores.
        handlers: of what it asks and tells, by name; each gets this object first.
        on_end: called once, with this object, when it has gone.

    Attributes:
        up: it is ready to serve.
        error: why it could not start, where it said so.
        held: by digest of API keys, its requests that are counted in.
        began: when it was started, by a clock that only grows.
        hung_for: seconds of silence, where these were why it was killed.
    """

    def __init__(
        self,
        number: int,
        client: int,
        handlers: Mapping[str, Handler],
        on_end: Callable[[ApiProcess], None],
    ) -> None:
        self.number = number
        self.client = client
        self.up = asyncio.Event()
        self.error: EngineError | None = None
        self.held: Counter[bytes] = Counter()
        self.began = time.monotonic()
        self.hung_for: float | None = None
        self.last = Told(number, 0, 0, Snapshot())
        self._gone = False
        own = {name: self._bound(handler) for name, handler in handlers.items()}
        self.channel = Channel(own, lambda: on_end(self))
        self._child: Child[Beat] | None = None

    def _bound(self, handler: Handler) -> Handler:
        return lambda *values: handler(self, *values)

    async def start(self, make: Callable[[int], ApiStart], listener: int) -> None:
        """Start the process; `make` is told the descriptor of its channel.

        Raises EngineDeadError where the system refuses.
        """
        what = f"API process {self.number}"
        try:
            ours, its = socket.socketpair()
        except OSError as error:
            raise EngineDeadError(f"start {what}", str(error), "the system's limits may say why") from error
        with its:
            self._child = Child(MODULE, make(its.fileno()), Beat, what=what, pass_fds=(its.fileno(), listener))
        await self.channel.open(ours)

    @property
    def pid(self) -> int:
        """Of its process."""
        return 0 if self._child is None else self._child.pid

    def addresses(self, dp_rank: int, pid: int) -> tuple[str, str]:
        """Where it binds its sockets for a core; each core of a rank has others."""
        assert self._child is not None
        place = f"{dp_rank}-{pid}"
        requests, outputs = (f"ipc://{self._child.directory}/{name}-{place}" for name in ("requests", "outputs"))
        return requests, outputs

    async def watch(self, seconds: float) -> None:
        """Ask it for signs of life, from when it is up until it has gone. Kill it where it gives none for `seconds`;
        its channel then ends, as with any death."""
        await self.up.wait()
        if await until_silent(lambda: self.channel.ask("alive"), seconds) and not self._gone:
            assert self._child is not None
            self.hung_for = seconds
            await asyncio.to_thread(self._child.kill)  # a process that is stopped heeds no other signal

    async def drain(self) -> int:
        """Tell it to leave in order. Returns how many requests it still has; 0 where it does not answer."""
        if self.up.is_set():
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    count: int = await self.channel.ask("drain")
                    return count
        return 0

    async def told(self) -> Told:
        """What it has counted."""
        if self.up.is_set() and not self._gone:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    self.take(*await self.channel.ask("snapshot"))
        return self.last

    def take(self, active: int, snapshot: object) -> None:
        """It told what it has counted."""
        found = Snapshot() if snapshot is None else msgspec.convert(snapshot, Snapshot, strict=False)
        self.last = Told(self.number, self.pid, active, found)

    async def end(self, seconds: float) -> int:
        """Wait until the process has ended, `seconds` at most, then end it. Returns its exit code. Idempotent."""
        self._gone = True
        child = self._child
        code = 0
        if child is not None:
            await asyncio.to_thread(child.wait, seconds)
            code = await asyncio.to_thread(child.end, 0)
            if code == FAILED:
                self.error = await asyncio.to_thread(child.death)
            child.close()
        self.channel.close()
        return code
