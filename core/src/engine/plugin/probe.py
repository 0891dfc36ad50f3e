"""One card after the other, each imported in a process of its own, where what hangs, crashes or leaves harms nobody.

    python -m engine.plugin.probe SECONDS

reads lines of JSON, each a candidate as a list, and answers each with a line of JSON, see `Report`. What every card
needs is imported once; then each card is imported in a fork of this process, which is as if it had been started for it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import NamedTuple

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.loading import load_entry_point
from engine.plugin.points import POINTS
from engine.types.errors import PluginError

HEAVY = ("torch", "transformers", "jax", "tensorflow", "triton")
"""Modules that a card must not import: `engine plugins why` and the start would wait for them."""


class Finding(NamedTuple):
    """What a probe saw.

    Attributes:
        seconds: that the import took.
        heavy: modules of `HEAVY` that it brought.
        found, remedy: what is wrong with the card; empty where nothing is.
    """

    seconds: float
    heavy: list[str]
    found: str = ""
    remedy: str = ""


class Report(NamedTuple):
    """What became of a probe.

    Attributes:
        finding: None where the process ended without one.
        code: its exit code, as `subprocess` has it; None where it did not end in time.
        said: the end of what it wrote to standard error.
    """

    finding: Finding | None
    code: int | None
    said: str = ""


def probe(candidate: Candidate) -> Finding:
    """Import what the candidate names: a card is also checked against its point's interface."""
    started, found, remedy = time.perf_counter(), "", ""
    try:
        if candidate.point in POINTS:
            Registry(found=[candidate]).card(candidate)
        else:
            load_entry_point(candidate)
    except PluginError as error:
        found, remedy = error.found, error.remedy
    seconds = time.perf_counter() - started
    return Finding(seconds, [name for name in HEAVY if name in sys.modules], found, remedy)


def apart(candidate: Candidate, seconds: float) -> Report:
    """Probe in a fork of this process, which is killed after so many seconds."""
    if candidate.point in POINTS:  # what every card of the point needs is not counted as this card's
        importlib.import_module(POINTS[candidate.point].interface.partition(":")[0])
    with tempfile.TemporaryFile() as errors:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _probe_and_leave(candidate, writer, errors.fileno())
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            code = _ended(child, answer.fileno(), seconds)
            content = answer.read() if code == 0 else b""
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 10_000))
        said = errors.read().decode(errors="replace")
    return Report(Finding(*json.loads(content)) if content else None, code, said)


def _probe_and_leave(candidate: Candidate, writer: int, errors: int) -> None:
    """In the fork. What the import writes to standard output is nobody's business, and there is no input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, nothing), (2, errors)):
        os.dup2(source, target)
    code = 1
    try:
        os.write(writer, json.dumps(probe(candidate)).encode())
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os._exit(code)


def _ended(child: int, answer: int, seconds: float) -> int | None:
    """The exit code of a child; None where it had to be killed. The pipe is closed, or readable, when it ends."""
    deadline = time.monotonic() + seconds
    select.select([answer], [], [], seconds)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.001)


def main() -> None:
    """Answer standard input."""
    seconds = float(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(apart(Candidate(*json.loads(line)), seconds)), flush=True)


if __name__ == "__main__":
    main()
