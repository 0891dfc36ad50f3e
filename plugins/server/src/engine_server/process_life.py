"""What every process of a server does alike: what it says and hears, how many files it may open, which loop it runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable

from engine.process.logs import logs_json, tell
from engine_kit.banner import show
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing

BACKLOG = 2048
"""Connections that may wait to be taken."""
DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""

log = logging.getLogger("engine.server")

OTHER_FILES = 256
"""What a process has open beside connections, generously."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are when Python looks for garbage; its own 700 are made by a step of a few streams."""


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


def spare_the_collector() -> None:
    """What stands now stands until the end: collections need not look at it. And a step's news, which are many objects
    and gone a moment later, are no reason for one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)


def allow_connections(count: int) -> None:
    """Raise the soft limit on open files, as far as the hard one lets, so that `count` connections find room. Says so
    where they do not: what comes then waits in the system's queue until others have left."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    wanted = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft < wanted:
        log.warning(
            "this process may open %d files, %d are wanted for --max-connections %d: raise the limit (ulimit -n)",
            soft,
            wanted,
            count,
        )
