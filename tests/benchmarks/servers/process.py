"""A server for the time of its measurement: started, waited for, ended with all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from engine_bench.exchange import Exchange, Target, send
from tests.benchmarks.peers.process import END_SECONDS, LOAD_SECONDS, worker_environment
from tests.benchmarks.peers.protocol import Settings
from tests.benchmarks.servers.known import TEMPLATE, Server, gguf_file

_PROBE_SECONDS = 5.0
_POLL_SECONDS = 0.1


class ServerError(Exception):
    """A server could not be started, or did not answer as it was asked to: the message says how."""


def convert(server: Server, python: Path, cache: Path, settings: Settings) -> None:
    """Write what the server reads instead of the checkpoint, where it does and it is not there yet.

    Raises ServerError with the last line of what was said.
    """
    path = gguf_file(settings)
    if not server.converts or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run(
        [str(python), "-m", server.peer.module, settings.checkpoint, str(temporary)],
        env=worker_environment(server.peer, cache, settings),
        capture_output=True,
        text=True,
        timeout=LOAD_SECONDS,
    )
    if done.returncode:
        raise ServerError(f"{server.name}: the checkpoint was not converted: {done.stderr.strip()[-300:]}")
    os.replace(temporary, path)


class ServerProcess:
    """A server, in a process group of its own, on a free port; serves when `wait` returns.

    Args:
        python: the interpreter of its environment.
        cache: for its log, the chat template, and what it compiles at run time.
    """

    def __init__(self, server: Server, python: Path, cache: Path, settings: Settings) -> None:
        self._name = server.name
        template = cache / "chat-template.jinja"
        template.write_text(TEMPLATE)
        self._log = cache / "logs" / f"server-{server.name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._target = Target("127.0.0.1", port, False, "", None)
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                server.line(python, settings, template, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(server.peer, cache, settings),
                cwd=self._log.parent,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until `GET /health` is answered with 200. Raises ServerError."""
        deadline = time.monotonic() + LOAD_SECONDS
        while not asyncio.run(self._is_healthy()):
            if self._process.poll() is not None:
                lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
                said = lines[-1][-300:] if lines else "it said nothing"
                raise ServerError(f"{self._name}: ended before it served: {said} (its log: {self._log})")
            if time.monotonic() > deadline:
                raise ServerError(f"{self._name}: does not serve after {LOAD_SECONDS} s (its log: {self._log})")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End it: asked first, killed with all its processes where that does not help. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _is_healthy(self) -> bool:
        exchange = Exchange(planned=time.perf_counter())
        await send(self._target, self._target.encode("GET", "/health"), exchange, _PROBE_SECONDS)
        return bool(exchange.pieces) and exchange.pieces[0][1].startswith(b"HTTP/1.1 200")
