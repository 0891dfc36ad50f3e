"""What every process of a server does alike: where it stands between its start and its end, how requests in progress
may finish, what it says, which loop it runs."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from engine.embedding import INTERVAL, AsyncLLM, Interval, Observed
from engine.process.logs import logs_json, tell
from engine.types.errors import ShuttingDownError
from engine_kit.banner import show
from engine_server.config import ServerConfig

ACCESS_LOG = "engine.access"
"""The name of the access log."""
ENDED_AS = "ended_as"
"""In a request's state: the status that says how an answer ended whose status had been sent before."""
FAREWELL_SECONDS = 1
"""How long answers that were cut off get to reach their clients."""


class Phase(enum.Enum):
    """What the server does with a new request: only in `SERVING` it is taken."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Lifecycle:
    """Belongs to one event loop.

    Attributes:
        phase: as of now.
        active: requests that were let in and whose answers have not ended.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request was let in."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its answer has ended, however it did."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()


async def drain(
    llm: AsyncLLM, lifecycle: Lifecycle, timeout: float, at_once: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Refuse new requests, wait for those in progress, cut off what is left.

    Args:
        llm: the engine.
        lifecycle: of the server.
        timeout: seconds to wait.
        at_once: set where nobody wants to wait any longer.
        say: tells the operator.
    """
    lifecycle.phase = Phase.DRAINING
    if lifecycle.active:
        say(f"finishing {lifecycle.active} requests, for {timeout:g} s at most; a second signal ends them at once")
        await first(timeout, lifecycle.idle(), at_once.wait())
    if lifecycle.active:
        say(f"cutting off {lifecycle.active} requests")
        llm.end_all(ShuttingDownError("a request in progress", "the server was stopped", "send it again"))
        await first(FAREWELL_SECONDS, lifecycle.idle())


async def first(timeout: float, *events: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these coroutines has ended, `timeout` seconds at most; the others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


BACKLOG = 2048
"""Connections that may wait to be taken."""
DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""

log = logging.getLogger("engine.server")

OTHER_FILES = 256
"""What a process has open beside connections, generously."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are when Python looks for garbage; its own 700 are made by a step of a few streams."""


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


class StatisticsLog:
    """Prints how the engine does while it is busy.

        task = asyncio.create_task(StatisticsLog(llm).run())

    Args:
        llm: the engine that is watched.
        write: takes a line; None prints it to standard error.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        llm: Observed,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._llm = llm
        self._interval = Interval(llm, clock)
        self._write = _print if write is None else write

    async def run(self, interval: float = INTERVAL) -> None:
        """Look every `interval` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(interval)
            line = self.line()
            if line is not None:
                self._write(line)

    def line(self) -> str | None:
        """What happened since the last call (or since this object was made); None where there was nothing to do."""
        known, unfinished, stats = self._llm.last_stats is not None, self._llm.num_unfinished, self._interval.look()
        if not known:
            return f"running 0, waiting {unfinished}" if unfinished else None
        if not unfinished and not stats.prompt_tokens and not stats.generation_tokens:
            return None
        parts = [
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"prompt {stats.prompt_tokens_per_second:,.1f} tokens/s",
            f"generation {stats.generation_tokens_per_second:,.1f} tokens/s",
            f"KV cache {_percent(stats.pages_used, stats.pages_total)}",
        ]
        if stats.prefix_queries:
            parts.append(f"prefix hits {_percent(stats.prefix_hits, stats.prefix_queries)}")
        if stats.num_drafts:
            parts.append(f"drafts accepted {_percent(stats.num_accepted_drafts, stats.num_drafts)}")
        if stats.num_preemptions:
            parts.append(f"preempted {stats.num_preemptions}")
        if stats.num_swap_preemptions:
            parts.append(f"of these swapped {stats.num_swap_preemptions}")
            parts.append(f"swapped now {stats.num_swapped}")
            parts.append(f"swap space {_percent(stats.swap_pages_used, stats.swap_pages_total)}")
        return ", ".join(parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _print(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
