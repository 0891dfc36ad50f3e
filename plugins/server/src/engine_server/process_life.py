"""What the process that an operator started says and hears, whether it serves or has others serve."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

from engine.embedding import ServerConfig, show
from engine.process.logs import logs_json, tell
from engine_server.keys import KeyRing

BACKLOG = 2048
"""Connections that may wait to be taken."""
DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""


def read_keys_at_signal(loop: asyncio.AbstractEventLoop, keys: KeyRing) -> None:
    """SIGHUP has the file of keys read again, where there is one; else it ends the program, as always."""
    if keys.is_read_from_file and hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, lambda: keys.look(changed=True))


def say(text: str) -> None:
    """Tell the operator."""
    tell("engine.server", text, f"engine: {text}")


def statistics_writer(settings: ServerConfig) -> Callable[[str], None] | None:
    """Who writes the lines of statistics; None: they are printed."""
    if not settings.log_stats:
        return lambda line: None
    return (lambda line: tell("engine.statistics", line, "", logging.INFO)) if logs_json() else None


def greet(text: str, address: str) -> None:
    """The banner, on standard output; in the log where that is JSON, as all the rest is."""
    if logs_json():
        tell("engine.server", text, "", logging.INFO, address=address)
    else:
        show(text)


def address_of(listener: socket.socket, settings: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (it is not made for Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
