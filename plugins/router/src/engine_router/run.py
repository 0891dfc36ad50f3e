"""Run the router: bind, watch the servers, serve, stop in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from engine.embedding import Merged
from engine.plugin import Registry
from engine_kit.logs import logs_json
from engine_router.app import Ahead, Counts, RouterApp, place_of
from engine_router.backends import Backend, Group, choose_router, watch
from engine_router.config import RouterConfig, addresses, read_config
from engine_server.lifecycle import (
    ACCESS_LOG,
    FAREWELL_SECONDS,
    Lifecycle,
    Phase,
    first,
    loop_factory,
    say,
    spare_the_collector,
)
from engine_server.middleware import Entry
from engine_server.program import allow_connections, listen
from engine_server.uvicorn_server import Server, bounded_protocol


def route(merged: Merged) -> int:
    """Route until SIGTERM or SIGINT; the exit code. After the first signal, requests in progress get
    `shutdown_timeout` seconds to finish, and new ones are refused; a second signal ends all at once.

    Raises the EngineError that stopped the start.
    """
    config = read_config(merged)
    if config.access_log:
        logging.getLogger(ACCESS_LOG).setLevel(logging.INFO)
    router = Router(config, merged)
    allow_connections(config.max_connections)
    with listen(config.host, config.port) as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(router.run(listener))


class Router:
    """The router's life in its event loop, and its parts. Raises an EngineError for what cannot be chosen or read.

    Attributes:
        app: what it serves.
        groups: the servers behind it.
        lifecycle: whether it takes requests.
    """

    def __init__(self, config: RouterConfig, merged: Merged) -> None:
        self._config = config
        self.lifecycle = Lifecycle()
        whole, prefill, decode = (addresses(named) for named in (config.backend, config.prefill, config.decode))
        asked, _ = merged.choice("router")
        registry = Registry.discover(plugins=merged.plugin_list)
        most = max(map(len, (whole, prefill, decode)))
        chosen = choose_router(registry, asked, merged.options().get("router", {}), most)

        def group(named: list[str], role: str) -> Group:
            backends = [Backend(one, role, rank) for rank, one in enumerate(named)]
            return Group(backends, chosen, config.prefix_tokens)

        answering = group(decode or whole, "decode" if decode else "")
        prefilling = group(prefill, "prefill") if prefill else None
        counts = Counts()
        ahead: Ahead | None = "push" if config.order == "decode-first" else "follow" if config.overlap else None
        self.groups = [one for one in (prefilling, answering) if one is not None]
        self._app = RouterApp(answering, prefilling, self.lifecycle, counts, ahead=ahead)
        self.app = Entry(
            self._app,
            counts.responses,
            max_body=config.max_body,
            timeout=config.body_timeout,
            access_log=config.access_log,
        )

    @property
    def backends(self) -> list[Backend]:
        """All servers."""
        return [backend for group in self.groups for backend in group.backends]

    async def run(self, listener: socket.socket) -> int:
        """Until a signal. Raises ConfigError for a server that others are to connect to, and that says they cannot."""
        await asyncio.gather(*map(place_of, self._app.listening))
        loop, stopped, now = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = self.server()

        def on_signal() -> None:
            server.force_exit = stopped.is_set()
            if stopped.is_set():
                now.set()
            stopped.set()

        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, on_signal)
        watching = asyncio.ensure_future(watch(self.groups, self._config.check_interval))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        self.lifecycle.phase = Phase.SERVING
        spare_the_collector()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        behind = ", ".join(f"{len(group.backends)} {group.backends[0].role or 'servers'}" for group in self.groups)
        say(f"routing at http://{shown}:{port}/v1 to {behind}")
        waiting = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait((waiting, serving), return_when=asyncio.FIRST_COMPLETED)
            self.lifecycle.phase = Phase.DRAINING
            if self.lifecycle.active:
                await first(self._config.shutdown_timeout, self.lifecycle.idle(), now.wait())
        finally:
            watching.cancel()
            waiting.cancel()
            server.should_exit = True
            await serving
            for backend in self.backends:
                backend.pool.drop()
        return 0

    def server(self) -> Server:
        """uvicorn's, around the application."""
        config = self._config
        return Server(
            uvicorn.Config(
                self.app,
                http=bounded_protocol(config.header_timeout, config.write_timeout, config.max_connections),
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                log_config=None if logs_json() else LOGGING_CONFIG,
                timeout_graceful_shutdown=FAREWELL_SECONDS,
                lifespan="off",
            )
        )
