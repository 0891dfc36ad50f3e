"""Run the server: bind, start the engine, serve, stop in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.embedding import AsyncLLM, EngineConfig
from engine.types.errors import ConfigError, EngineError
from engine_kit.banner import greeting
from engine_server.certificate import check_certificate
from engine_server.config import ServerConfig
from engine_server.keys import AdminKey, KeyLimits, KeyRing
from engine_server.lifecycle import (
    ACCESS_LOG,
    BACKLOG,
    DEATH_NOTICE_SECONDS,
    Lifecycle,
    Phase,
    StatisticsLog,
    address_of,
    allow_connections,
    drain,
    greet,
    loop_factory,
    say,
    spare_the_collector,
    statistics_writer,
)

if TYPE_CHECKING:
    import uvicorn


def serve(config: EngineConfig, settings: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 1 when the engine died.

    After the first signal, requests in progress get `shutdown_timeout` seconds to finish, and new ones are refused; a
    second signal ends all at once.

    Raises the EngineError that stopped the start.
    """
    if settings.access_log:
        logging.getLogger(ACCESS_LOG).setLevel(logging.INFO)
    early = _leave_at_sigterm()
    try:
        return _serve(config, settings, early)
    except _Terminated:
        return 0


def _serve(config: EngineConfig, settings: ServerConfig, early: Sequence[int]) -> int:
    allow_connections(settings.max_connections)
    admin = AdminKey(settings.admin_key)
    keys = KeyRing(
        settings.api_key or (),
        settings.api_key_file,
        KeyLimits(settings.requests_per_minute, settings.max_concurrent_requests),
        admin,
    )
    if (limited := settings.requests_per_minute or settings.max_concurrent_requests) and not keys:
        raise ConfigError(
            f"limit each API key to {limited}", "no API key is asked for", "pass --api-key or --api-key-file too"
        )
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    listener = _listen(settings.host, settings.port)
    if settings.api_workers > 1:
        from engine_server.processes.parent import serve_several

        try:
            return serve_several(config, settings, listener, keys, early)
        finally:
            listener.close()
    llm = AsyncLLM(config)  # its process loads the model while this one imports the server
    try:
        from engine_server.uvicorn_server import make_server

        lifecycle = Lifecycle()
        server = make_server(llm, settings, lifecycle, keys, admin)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            run = _Run(llm, server, lifecycle, settings, keys, early)
            return runner.run(run.serve(listener))
    finally:
        llm.shutdown()
        listener.close()


class _Run:
    """One server's life in its event loop."""

    def __init__(
        self,
        llm: AsyncLLM,
        server: uvicorn.Server,
        lifecycle: Lifecycle,
        settings: ServerConfig,
        keys: KeyRing,
        early: Sequence[int] = (),
    ) -> None:
        self._llm = llm
        self._server = server
        self._lifecycle = lifecycle
        self._settings = settings
        self._keys = keys
        self._early = early
        self._dead: EngineError | None = None
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def serve(self, listener: socket.socket) -> int:
        """See `engine_server.run.serve`. Connections are taken at once, so that probes learn that the model loads."""
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_, self._on_signal)
        self._keys.read_at_signal(loop)
        if self._early:
            self._on_signal()
        stopped = asyncio.ensure_future(self._stop.wait())
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        statistics = asyncio.ensure_future(StatisticsLog(self._llm, statistics_writer(self._settings)).run())
        watching = asyncio.ensure_future(self._keys.watch())
        try:
            if not await self._start(stopped):
                return 0
            spare_the_collector()
            self._lifecycle.phase = Phase.SERVING
            assert self._llm.worker is not None
            address = address_of(listener, self._settings)
            told = greeting(self._llm.plan, self._llm.worker, address, verbose=self._settings.verbose)
            greet(told, address)
            await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
            if self._dead is None:
                await self._drain()
            return 0 if self._dead is None else 1
        finally:
            stopped.cancel()
            statistics.cancel()
            watching.cancel()
            self._server.should_exit = True
            await serving

    async def _start(self, stopped: asyncio.Future[Any]) -> bool:
        """Wait for the engine; False where a signal came first."""
        starting = asyncio.ensure_future(self._llm.start(self._on_death))
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await asyncio.to_thread(self._llm.shutdown)
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        return True

    async def _drain(self) -> None:
        await drain(self._llm, self._lifecycle, self._settings.shutdown_timeout, self._stop_now, say)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
            self._server.force_exit = True
        self._stop.set()

    def _on_death(self, error: EngineError) -> None:
        self._dead = error
        say(str(error))
        asyncio.get_running_loop().call_later(DEATH_NOTICE_SECONDS, self._stop.set)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: passes wherever Ctrl-C does. A SystemExit would be a driver's fault where one is imported."""


def _leave_at_sigterm() -> list[int]:
    """End the program in order, with 0, at a SIGTERM that comes before the event loop takes signals.

    Without this the signal would end it unasked, or do nothing in a container, where this may be the first process.

    Returns:
        The signals that came: an exception that is raised where nobody can see it (in a finaliser) is lost.
    """
    came: list[int] = []

    def leave(number: int, frame: object) -> None:
        came.append(number)
        raise _Terminated

    signal.signal(signal.SIGTERM, leave)
    return came


def _listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket: a port that is taken is found out before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"listen on {host}:{port}", str(error), "pass another --host or --port (--port 0 takes a free one)"
        ) from error
    listener.setblocking(False)
    return listener
