"""Run the server: bind, start the engine, serve, stop in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any

from engine.embedding import EngineConfig
from engine.types.errors import ConfigError
from engine_kit.async_llm import AsyncLLM
from engine_server.certificate import check_certificate
from engine_server.config import ServerConfig
from engine_server.keys import KeyLimits, KeyRing
from engine_server.lifecycle import ACCESS_LOG, Lifecycle, Phase, drain, loop_factory, say, spare_the_collector
from engine_server.program import Program, allow_connections, listen


def serve(config: EngineConfig, settings: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 1 when the engine died.

    After the first signal, requests in progress get `shutdown_timeout` seconds to finish, and new ones are refused; a
    second signal ends all at once.

    Raises the EngineError that stopped the start.
    """
    _check_role(config, settings)
    if settings.access_log:
        logging.getLogger(ACCESS_LOG).setLevel(logging.INFO)
    early = _leave_at_sigterm()
    try:
        return _serve(config, settings, early)
    except _Terminated:
        return 0


def _check_role(config: EngineConfig, settings: ServerConfig) -> None:
    """`engine serve` has given `kv_role` to the connector; who calls `serve` in Python has to. Raises ConfigError."""
    role, given = settings.kv_role, config.options_for("kv_connector").get("role")
    if role not in (None, given):
        raise ConfigError(
            f"serve with kv_role={role!r}",
            f"the connector's option role is {given!r} in the engine's settings",
            f'name it there: EngineConfig(..., kv_connector="tcp", **{{"kv_connector.role": {role!r}}})',
        )


def _serve(config: EngineConfig, settings: ServerConfig, early: Sequence[int]) -> int:
    allow_connections(settings.max_connections)
    keys = KeyRing(
        settings.api_key or (),
        settings.api_key_file,
        KeyLimits(settings.requests_per_minute, settings.max_concurrent_requests),
        settings.admin_key,
    )
    if (limited := settings.requests_per_minute or settings.max_concurrent_requests) and not keys:
        raise ConfigError(
            f"limit each API key to {limited}", "no API key is asked for", "pass --api-key or --api-key-file too"
        )
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    with listen(settings.host, settings.port) as listener:
        if settings.api_workers > 1:
            from engine_server.processes.parent import serve_several

            return serve_several(config, settings, listener, keys, early)
        llm = AsyncLLM(config)  # its process loads the model while this one imports the server
        try:
            program = _OneProcess(llm, listener, settings, keys, early)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(program.run(llm))
        finally:
            llm.shutdown()


class _OneProcess(Program):
    """The engine's frontend and the server are in this process."""

    def __init__(
        self, llm: AsyncLLM, listener: socket.socket, settings: ServerConfig, keys: KeyRing, early: Sequence[int]
    ) -> None:
        from engine_server.adapters import ServedAdapters
        from engine_server.uvicorn_server import make_server

        super().__init__(settings, keys, early)
        self._llm = llm
        self._listener = listener
        self._lifecycle = Lifecycle()
        self._adapters = ServedAdapters(llm, settings)
        self._server = make_server(llm, settings, self._lifecycle, keys, adapters=self._adapters)
        self._serving: asyncio.Future[None]

    async def _start(self, stopped: asyncio.Future[Any]) -> bool:
        """Connections are taken at once, so that probes learn that the model loads."""
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        starting = asyncio.ensure_future(self._begin())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await asyncio.to_thread(self._llm.shutdown)
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        spare_the_collector()
        self._lifecycle.phase = Phase.SERVING
        assert self._llm.worker is not None
        self._greet(self._llm.plan, self._llm.worker, self._listener)
        return True

    async def _begin(self) -> None:
        await self._llm.start(self._on_death)
        await self._adapters.begin()

    async def _serve(self, stopped: asyncio.Future[Any]) -> None:
        await asyncio.wait((stopped, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._dead is None:
            await drain(self._llm, self._lifecycle, self._settings.shutdown_timeout, self._stop_now, say)

    async def _leave(self) -> None:
        self._server.should_exit = True
        await self._serving

    def _on_signal(self) -> None:
        self._server.force_exit = self._stop.is_set()
        super()._on_signal()


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
