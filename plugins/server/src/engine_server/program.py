"""The program that an operator starts, with one process that serves or with several: from its first signal to its exit
code, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.embedding import Launch
from engine.types.errors import ConfigError, EngineError
from engine.types.start import WorkerReady
from engine_kit.banner import greeting, show
from engine_kit.lifecycle import INTERVAL, NOTHING, Interval, Observed
from engine_kit.logs import logs_json, tell
from engine_kit.prompt_sources import BLENDED, prompt_sources, shares
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import say

BACKLOG = 2048
"""Connections that may wait to be taken."""
DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose engine died goes on answering 503, so that clients learn why."""
OTHER_FILES = 256
"""What a process has open beside connections, generously."""

log = logging.getLogger("engine.server")


class Program:
    """The program's life in its event loop. Whoever inherits knows how it starts, serves and leaves. `early` are the
    signals that came before the event loop took them."""

    def __init__(self, settings: ServerConfig, keys: KeyRing, early: Sequence[int]) -> None:
        self._settings = settings
        self._keys = keys
        self._early = early
        self._dead: EngineError | None = None
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, engine: Observed) -> int:
        """Serve until a signal, or until the engine dies; the exit code: 0, or 1 when it died."""
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_, self._on_signal)
        self._keys.read_at_signal(loop)
        if self._early:
            self._on_signal()
        stopped = asyncio.ensure_future(self._stop.wait())
        beside = [stopped, asyncio.ensure_future(self._keys.watch())]
        if self._settings.log_stats:
            beside.append(asyncio.ensure_future(StatisticsLog(engine).run()))
        try:
            if not await self._start(stopped):
                return 0
            await self._serve(stopped)
            return 0 if self._dead is None else 1
        finally:
            for task in beside:
                task.cancel()
            await self._leave()

    async def _start(self, stopped: asyncio.Future[Any]) -> bool:
        """Start everything; False where a signal came first. Raises the error that stops the start."""
        raise NotImplementedError

    async def _serve(self, stopped: asyncio.Future[Any]) -> None:
        """Until it is stopped."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """End everything that was started."""
        raise NotImplementedError

    def _greet(self, plan: Launch, worker: WorkerReady, listener: socket.socket, processes: int = 1) -> None:
        """The banner, on standard output; in the log where that is JSON, as all the rest is."""
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        address = f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"
        text = greeting(plan, worker, address, processes, verbose=self._settings.verbose)
        if logs_json():
            tell("engine.server", text, "", logging.INFO, address=address)
        else:
            show(text)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _on_death(self, error: EngineError) -> None:
        self._dead = error
        say(str(error))
        asyncio.get_running_loop().call_later(DEATH_NOTICE_SECONDS, self._stop.set)


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket: a port that is taken is found out before anything is loaded.

    Raises ConfigError where the address cannot be had.
    """
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
    """Tells how the engine does while it is busy: in a line on standard error; in the log where that is JSON."""

    def __init__(self, llm: Observed, clock: Callable[[], float] = time.monotonic) -> None:
        self._llm = llm
        self._interval = Interval(llm, clock)
        self._sources = prompt_sources(llm.last_stats or NOTHING)

    async def run(self, interval: float = INTERVAL) -> None:
        """Look every `interval` seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(interval)
            if (line := self.line()) is None:
                continue
            if logs_json():
                tell("engine.statistics", line, "", logging.INFO)
            else:
                print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)

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
            f"prompt {stats.prompt_tokens / stats.seconds:,.1f} tokens/s",
            f"generation {stats.generation_tokens / stats.seconds:,.1f} tokens/s",
            f"KV cache {_percent(stats.pages_used, stats.pages_total)}",
        ]
        before, self._sources = self._sources, prompt_sources(self._llm.last_stats or NOTHING)
        if stats.prefix_queries:
            if stats.kv_connectors or BLENDED in self._sources:
                grown = {name: count - before.get(name, 0) for name, count in self._sources.items()}
                parts.append(f"prompts from {shares(grown)}")
            else:
                parts.append(f"prefix hits {_percent(stats.prefix_hits, stats.prefix_queries)}")
        if stats.num_drafts:
            accepted = stats.num_accepted_drafts
            parts.append(f"drafts accepted {_percent(accepted, stats.num_drafts)}")
            parts.append(f"{1 + accepted / max(stats.num_draft_rows, 1):.2f} tokens a step with drafts")
        if stats.num_preemptions:
            parts.append(f"preempted {stats.num_preemptions}")
        if stats.num_swap_preemptions:
            parts.append(f"of these swapped {stats.num_swap_preemptions}")
            parts.append(f"swapped now {stats.num_swapped}")
            parts.append(f"swap space {_percent(stats.swap_pages_used, stats.swap_pages_total)}")
        return ", ".join(parts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"
