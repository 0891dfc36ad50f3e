"""A real master of a Mooncake Store for tests: that of the library's wheel."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

SEGMENT = 16 << 20


def why_not() -> str:
    """Why the library cannot be used here; "" where it can."""
    if find_spec("mooncake") is None:
        return "the library is not installed: pip install 'engine-mooncake[cpu]'"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"the library does not load: {error}"
    return ""


class Master:
    """On a free port. It can be ended and started again, empty."""

    def __init__(self) -> None:
        self._ports = [_free_port(), _free_port()]
        self.address = f"127.0.0.1:{self._ports[0]}"
        self.start()

    def start(self) -> None:
        spec = find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        program = Path(spec.origin).with_name("mooncake_master")
        program.chmod(0o755)
        settings = [f"--rpc_port={self._ports[0]}", f"--metrics_port={self._ports[1]}", "--rpc_address=127.0.0.1"]
        self._process = subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._ports[0]), 1).close()
                return
            time.sleep(0.02)
        raise AssertionError("the master does not start")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
