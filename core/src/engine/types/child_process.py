"""What a process that the engine starts does first: take its start message, and watch that its parent lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from typing import Any, BinaryIO

from engine.types import wire

PARENT_DIED = 3
"""The exit code of a process whose parent has gone."""


def take_start(kind: type, directory: str) -> Any:
    """The message of type `kind` from standard input, where the parent keeps its end of the pipe open.

    From then on the process leaves, and removes the directory, as soon as that end is closed: nobody is there any more
    to give orders or to read answers, and the device must be freed. Raises SystemExit(PARENT_DIED) where that was
    before a whole message had come.
    """
    pipe = sys.stdin.buffer
    try:
        start = wire.decoder(kind).decode(wire.read_frame(pipe))
    except EOFError:
        shutil.rmtree(directory, ignore_errors=True)
        raise SystemExit(PARENT_DIED) from None
    threading.Thread(target=_watch_parent, args=(pipe, directory), name="parent", daemon=True).start()
    return start


def _watch_parent(pipe: BinaryIO, directory: str) -> None:
    with contextlib.suppress(OSError):
        while pipe.read(1):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(PARENT_DIED)
