"""An API process: `python -m engine_server.processes.child`, with its start message.

It listens on the port that all share, talks to the engine cores by sockets of its own, and asks the first process for
what they have together. It leaves when that one says so, or has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.embedding import Attached, EngineConfig
from engine.process import wire
from engine.process.run import run
from engine.process.wire import Parent
from engine.types.errors import rebuild_error
from engine.types.messages import Beat, Shutdown
from engine_kit.async_llm import AsyncLLM
from engine_kit.logs import log_as
from engine_server.adapters import ServedAdapters
from engine_server.config import ServerConfig
from engine_server.lifecycle import ACCESS_LOG, Lifecycle, Phase, drain, loop_factory, spare_the_collector
from engine_server.metrics.gathering import Gathered, Snapshot
from engine_server.processes.attached import AttachedCores, CorePlace
from engine_server.processes.channel import ApiStart, Channel, ToApiProcess
from engine_server.processes.shared import SharedBackground, SharedKeys, SharedResponses
from engine_server.uvicorn_server import Server, make_server

SNAPSHOT_SECONDS = 1.0
"""How often the first process is told of what was counted, where that is new, or else that this one lives: what it had
counted since it told last is lost when it dies."""


class ApiServer:
    """One API process's life in its event loop; for its routes, `engine_server.state.Others`."""

    def __init__(self, start: ApiStart, parent: Parent[ToApiProcess]) -> None:
        self._start = start
        self._parent = parent
        self._config = EngineConfig(**json.loads(start.config))
        self._settings = ServerConfig(**json.loads(start.settings))
        if self._settings.access_log:
            logging.getLogger(ACCESS_LOG).setLevel(logging.INFO)
        self._lifecycle = Lifecycle()
        self._cores = AttachedCores(start.client, start.num_cores)

        self._channel = Channel(
            {
                "ready": lambda place: self._cores.ready(msgspec.convert(place, CorePlace)),
                "died": lambda dp_rank, parts: self._cores.died(dp_rank, rebuild_error(tuple(parts))),
                "serve": self._serve,
                "drain": self._drain,
                "keys": self._take_keys,
                "snapshot": self._snapshot,
                "cancel": lambda identity: self.background.cancel_here(identity),
                "cache_reset": lambda: self._llm.forget_cached(),
            },
            parent.send,
        )
        self.background = SharedBackground(self._lifecycle, self._channel)
        self._keys = SharedKeys(start.asks_for_key, self._settings.admin_key, self._channel)
        self.responses = SharedResponses(self._settings.response_store_size, self._channel)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._may_listen = asyncio.Event()
        self._counted: Callable[[], Snapshot] | None = None
        self._llm: AsyncLLM
        self._server: Server

    async def run(self) -> int:
        """Serve until told to leave; the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)  # this one alone; another comes in its place
        loop.add_reader(self._parent.inbox.fileno(), self._hear)
        self._hear()  # what came before is not told again
        attached = Attached(self._start.core, self._cores.connect, first=self._start.number == 0)
        self._llm = AsyncLLM(self._config, attached)
        with socket.socket(fileno=self._start.listener) as listener:
            return await self._run(listener)

    async def _run(self, listener: socket.socket) -> int:
        adapters = ServedAdapters(self._llm, self._settings)
        self._server = make_server(self._llm, self._settings, self._lifecycle, self._keys, self, adapters)
        serving = asyncio.ensure_future(self._listen(listener))
        telling = asyncio.ensure_future(self._tell_snapshots())
        stopped = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._begin(adapters))
        try:
            await asyncio.wait((starting, stopped, serving), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not self._stop.is_set():
                starting.result()
                spare_the_collector()
                self._channel.tell("up")
                await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
                await drain(
                    self._llm, self._lifecycle, self._settings.shutdown_timeout, self._stop_now, lambda text: None
                )
            return 0
        finally:
            telling.cancel()
            stopped.cancel()
            self._server.should_exit = True
            self._may_listen.set()
            await serving
            self._channel.tell("snapshot", *self._snapshot())
            await asyncio.to_thread(self._llm.shutdown)
            await asyncio.gather(starting, return_exceptions=True)

    async def _begin(self, adapters: ServedAdapters) -> None:
        await self._llm.start()
        await adapters.begin()

    async def _listen(self, listener: socket.socket) -> None:
        await self._may_listen.wait()
        if not self._server.should_exit:
            await self._server.serve(sockets=[listener])

    # -- `engine_server.state.Others` ----------------------------------------------------------------------------------
    def counted_by(self, snapshot: Callable[[], Snapshot]) -> None:
        self._counted = snapshot

    async def gather(self) -> Gathered:
        told, parent = await self._channel.ask("gather")
        return Gathered(told, parent)

    def cache_reset(self) -> None:
        self._channel.tell("cache_reset")

    # -- what the first process says -----------------------------------------------------------------------------------
    def _hear(self) -> None:
        """All that has come: the descriptor tells of news once."""
        while (message := self._parent.receive(0)) is not None:
            if isinstance(message, Shutdown):
                self._end_now()
            else:
                self._channel.hear(message)

    def _serve(self) -> None:
        self._lifecycle.phase = Phase.SERVING
        self._may_listen.set()

    def _take_keys(self, table: Sequence[tuple[bytes, str, bool]]) -> None:
        """Nobody is heard before the keys are there: one that fits would be refused."""
        self._keys.replace(table)
        if not self._start.replaces:
            self._may_listen.set()

    def _drain(self) -> int:
        """Leave in order. Returns how many requests are in progress."""
        self._lifecycle.phase = Phase.DRAINING
        self._stop.set()
        return self._lifecycle.active

    def _end_now(self) -> None:
        self._stop.set()
        self._stop_now.set()
        with contextlib.suppress(AttributeError):  # it has not begun to serve
            self._server.force_exit = True

    # -- what this one has counted -------------------------------------------------------------------------------------
    def _snapshot(self) -> tuple[int, Any]:
        """Requests in progress, and what was counted."""
        return self._lifecycle.active, None if self._counted is None else self._counted()

    async def _tell_snapshots(self) -> None:
        before = b""
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            told = self._snapshot()
            if (now := wire.encode(told)) != before:
                before = now
                self._channel.tell("snapshot", *told)
            else:
                self._parent.send(Beat())


def main(start: ApiStart, parent: Parent[ToApiProcess]) -> int:
    """Serve; the process's exit code."""
    number = start.number
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s %(name)s [api {number}]: %(message)s")
    log_as(start.core.worker.log_format, api_worker=number)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(ApiServer(start, parent).run())


if __name__ == "__main__":
    run("an API process", ApiStart, ToApiProcess, main)
