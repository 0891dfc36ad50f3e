"""Run the server: bind, start the engine, serve, stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.frontend.async_llm import AsyncLLM
from engine.types.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import uvicorn

DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""


def serve(config: EngineConfig, host: str, port: int, shutdown_timeout: float = 10.0) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 1 when the engine died.

    Args:
        config: of the engine.
        host, port: where to listen; port 0 takes a free one, which is printed.
        shutdown_timeout: seconds that requests in progress get to finish after the signal.

    Raises the EngineError that stopped the start.
    """
    listener = _listen(host, port)
    llm = AsyncLLM(config)  # its process loads the model while this one imports the server
    try:
        import uvicorn

        from engine.server.app import create_app

        class Server(uvicorn.Server):
            """uvicorn's, which leaves signals to us: its own handling would end the process before the engine."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        app = create_app(llm, (llm.model_name,))
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=round(shutdown_timeout),
            lifespan="off",
        )
        server = Server(settings)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(llm, server, listener))
    finally:
        llm.shutdown()
        listener.close()


async def _serve(llm: AsyncLLM, server: uvicorn.Server, listener: socket.socket) -> int:
    dead: list[EngineError] = []

    async def leave() -> None:
        await asyncio.sleep(DEATH_NOTICE_SECONDS)
        server.should_exit = True

    def on_death(error: EngineError) -> None:
        dead.append(error)
        print(f"engine: {error}", file=sys.stderr, flush=True)
        tasks.add(asyncio.ensure_future(leave()))

    tasks: set[asyncio.Future[None]] = set()
    loop = asyncio.get_running_loop()
    for signal_ in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_, server.handle_exit, signal_, None)
    await llm.start(on_death)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"Engine serves {llm.model_name} on http://{shown}:{port}/v1", flush=True)
    await server.serve(sockets=[listener])
    return 1 if dead else 0


def _listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket: a port that is taken is found out before the model is loaded."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"listen on port {port}", "ports go from 0 to 65535", "pass another --port")
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
