"""A server of our own for the time of a measurement: `engine serve` on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import BinaryIO, NamedTuple

from engine.types.errors import EngineError

START_SECONDS = 600
STOP_SECONDS = 30
_ADDRESS = re.compile(rb"https?://(?:[\w.]+|\[[\da-f:]+\]):\d+")


class RunningServer(NamedTuple):
    """A server that serves: its base address, and its process."""

    url: str
    pid: int


@contextmanager
def own_server(
    flags: Sequence[str], program: Sequence[str] = ("engine",), command: str = "serve"
) -> Iterator[RunningServer]:
    """Start a server, and stop it at the end, however that comes.

    Args:
        flags: of `engine serve`.
        program: the module that is run as `engine`, and what it takes before its command.
        command: of it, "serve" or "route".

    Raises:
        EngineError: it ended before it served; what it printed is told.
    """
    line = [sys.executable, "-m", *program, command, *flags, "--host", "127.0.0.1", "--port", "0"]
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with tempfile.TemporaryFile() as output:
            # Its output goes to a file: a pipe that nobody reads would fill up and stop it.
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                yield RunningServer(_wait_until_it_serves(process, output), process.pid)
            finally:
                _stop(process)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_until_it_serves(process: subprocess.Popen[bytes], output: BinaryIO) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        ended = process.poll() is not None
        output.seek(0)
        printed = output.read()
        if ended:
            last = printed.decode(errors="replace").strip()[-2000:]
            raise EngineError("start a server to measure", f"it ended with exit code {process.returncode}:\n{last}")
        if found := _ADDRESS.search(printed):
            return found.group().decode()
        if time.monotonic() > deadline:
            raise EngineError("start a server to measure", f"it does not serve after {START_SECONDS} s")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, so that the server is stopped too."""
    raise SystemExit(128 + number)
