"""Parts of the check: each a process with a limit, whose end is seen whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE = 3.0
"""Seconds between asking a process to end and killing it."""
PYTEST_GRACE = 15.0
"""Of pytest, whose processes end one another for up to ten seconds before it says what failed."""


class Outcome:
    """What a part said, and how it ended.

    Attributes:
        lines: of its standard output.
        status: its exit status; None where it was stopped at its limit.
        seconds: that it took.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.status: int | None = None
        self.seconds = 0.0


def run(
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str],
    echo: IO[str] | None = None,
    stop: int = signal.SIGTERM,
    grace: float = GRACE,
) -> Outcome:
    """Run a command for at most `limit` seconds, with all that it starts; its output is passed on as it comes.

    Standard error goes with standard output. Never raises for what the command does. `stop` is the signal that asks it
    to end then, `grace` seconds before it is killed.
    """
    outcome, began = Outcome(), time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts ends with it
    )
    assert process.stdout is not None

    def read(stream: IO[str]) -> None:
        for line in stream:
            outcome.lines.append(line.rstrip("\n"))
            if echo is not None:
                print(line, end="", file=echo, flush=True)

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        outcome.status = process.wait(timeout=max(0.1, limit))
    except subprocess.TimeoutExpired:
        _end(process, stop, grace)
    reader.join(timeout=GRACE)  # a child that outlives it may hold the pipe
    if outcome.status is not None:
        _signal(process, signal.SIGKILL)
    outcome.seconds = time.monotonic() - began
    return outcome


def _end(process: subprocess.Popen[str], stop: int, grace: float) -> None:
    _signal(process, stop)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def outlived(mark: str) -> list[int]:
    """Kill all processes that have this entry ("NAME=value") in their environment, in whatever session they are: one
    that still computes takes half of the GPU from whoever is measured. Returns their ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found.append(int(path.parent.name))
    return found


class Budget:
    """Time for all parts.

    Args:
        seconds: until the table has to be printed.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def limit(self, most: float, reserved: float = 0.0) -> float:
        """Seconds for a part: `most`, or what is left when others keep `reserved`."""
        return max(0.0, min(most, self._end - time.monotonic() - reserved))
