"""Run the server: bind, start the engine, serve, stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.config.server import ServerConfig
from engine.frontend import banner
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.plugin_record import record_start
from engine.frontend.statistics import StatisticsLog
from engine.server.certificate import check_certificate
from engine.server.descriptors import allow_connections
from engine.server.keys import AdminKey, KeyRing
from engine.server.lifecycle import ACCESS_LOG, Lifecycle, Phase
from engine.server.limits import KeyLimits
from engine.types.errors import ConfigError, EngineDeadError, EngineError
from engine.types.json_log import logs_json, tell

if TYPE_CHECKING:
    import uvicorn

DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are when Python looks for garbage; its own 700 are made by a step of a few streams."""
FAREWELL_SECONDS = 1
"""How long answers that were cut off get to reach their clients."""


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
    if config.grammar_warm_up is None:
        config = config.model_copy(update={"grammar_warm_up": True})
    llm = AsyncLLM(config)  # its process loads the model while this one imports the server
    try:
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        from engine.server.app import create_app
        from engine.server.http import bounded_protocol

        class Server(uvicorn.Server):
            """uvicorn's, which leaves signals to us: its own handling would end the process before the engine."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        lifecycle = Lifecycle()
        uvicorn_settings = uvicorn.Config(
            create_app(llm, (llm.model_name,), settings, lifecycle, keys, admin),
            http=bounded_protocol(settings.header_timeout, settings.write_timeout, settings.max_connections),
            log_level="warning",
            access_log=False,
            log_config=None if logs_json() else LOGGING_CONFIG,  # its own writes text
            timeout_graceful_shutdown=FAREWELL_SECONDS,
            lifespan="off",
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            run = _Run(llm, Server(uvicorn_settings), lifecycle, settings, keys, early)
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
        self._llm, self._server, self._lifecycle, self._settings = llm, server, lifecycle, settings
        self._keys, self._early = keys, early
        self._dead: EngineError | None = None
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def serve(self, listener: socket.socket) -> int:
        """See `engine.server.run.serve`. Connections are taken at once, so that probes learn that the model loads."""
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_, self._on_signal)
        if self._early:
            self._on_signal()
        stopped = asyncio.ensure_future(self._stop.wait())
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        statistics = asyncio.ensure_future(StatisticsLog(self._llm, _statistics()).run())
        watching = asyncio.ensure_future(self._keys.watch())
        try:
            if not await self._start(stopped):
                return 0
            _spare_the_collector()
            self._lifecycle.phase = Phase.SERVING
            assert self._llm.worker is not None
            address = _address(listener, self._settings)
            _greet(banner.render(self._llm.plan, self._llm.worker, address), address)
            record_start(self._llm.plan, self._llm.worker, "engine serve")
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
        """Refuse new requests, wait for those in progress, cut off what is left."""
        lifecycle, timeout = self._lifecycle, self._settings.shutdown_timeout
        lifecycle.phase = Phase.DRAINING
        if lifecycle.active:
            _say(f"finishing {lifecycle.active} requests, for {timeout:g} s at most; a second signal ends them at once")
            await _first(timeout, lifecycle.idle(), self._stop_now.wait())
        if lifecycle.active:
            _say(f"cutting off {lifecycle.active} requests")
            self._llm.end_all(EngineDeadError("a request in progress", "the server was stopped", "send it again"))
            await _first(FAREWELL_SECONDS, lifecycle.idle())

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
            self._server.force_exit = True
        self._stop.set()

    def _on_death(self, error: EngineError) -> None:
        self._dead = error
        _say(str(error))
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


async def _first(timeout: float, *events: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these coroutines has ended, `timeout` seconds at most; the others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _spare_the_collector() -> None:
    """What stands now stands until the end: collections need not look at it. And a step's news, which are many objects
    and gone a moment later, are no reason for one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)


def _say(text: str) -> None:
    tell("engine.server", text, f"engine: {text}")


def _statistics() -> Callable[[str], None] | None:
    """Who writes the lines of statistics; None: they are printed."""
    return (lambda line: tell("engine.statistics", line, "", logging.INFO)) if logs_json() else None


def _greet(text: str, address: str) -> None:
    """The banner, on standard output; in the log where that is JSON, as all the rest is."""
    if logs_json():
        tell("engine.server", text, "", logging.INFO, address=address)
    else:
        print(text, flush=True)


def _address(listener: socket.socket, settings: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def _listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket: a port that is taken is found out before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"listen on {host}:{port}", str(error), "pass another --host or --port (--port 0 takes a free one)"
        ) from error
    listener.setblocking(False)
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (it is not made for Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
