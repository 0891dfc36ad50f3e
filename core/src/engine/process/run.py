"""What a process that `Child` starts does: hear its start message and its parent, and leave when that has gone."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from engine.process import wire
from engine.process.link import Inbox, Outbox
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Failed

T = TypeVar("T")

log = logging.getLogger("engine.process")

FAILED = 1
"""The exit code of a process that told why it ends."""
PARENT_DIED = 3
"""The exit code of a process whose parent has gone."""


class Parent(Generic[T]):
    """The parent, as its child sees it.

    Args:
        heard: the type of what it says: a union of tagged structs.
        directory: private to both.

    Attributes:
        inbox, outbox: what it is heard and told with.
        at_end: what is to be ended when all that was told is on its way.
    """

    def __init__(self, heard: Any, directory: str) -> None:
        self.directory = directory
        self.inbox: Inbox[T] = Inbox(heard, f"ipc://{directory}/requests")
        self.outbox = Outbox(f"ipc://{directory}/outputs")
        self.at_end = contextlib.ExitStack()

    def send(self, message: Any) -> None:
        """Tell the parent; never blocks. Raises EngineDeadError for what cannot travel."""
        self.outbox.put(message)

    def receive(self, timeout: float | None = None, awake: float = 0.0) -> T | None:
        """The next message; None where none comes within `timeout` seconds (None: wait), of which the first `awake` are
        not slept through. One that cannot be read is logged."""
        try:
            return self.inbox.get(timeout, awake)
        except msgspec.DecodeError as error:
            log.error("a message from the parent process could not be read: %s", error)
            return None


def run(what: str, start: Any, heard: Any, main: Callable[[Any, Parent[Any]], int]) -> NoReturn:
    """Be the child: call `main` with the start message and the parent, and leave with the exit code that it returns.

    What it raises is told to the parent, whatever it is. Ctrl-C is the parent's business; a crash, and SIGUSR1, which
    a parent sends to a child that hangs, write the stacks of all threads to standard error.

    Args:
        what: this process is, for errors: "the engine core".
        start: the type of the start message.
        heard: the type of what the parent says later: a union of tagged structs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    directory = sys.argv[1]
    message = _take_start(start, directory)
    parent: Parent[Any] = Parent(heard, directory)
    code = FAILED
    with parent.at_end:
        try:
            code = main(message, parent)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else FAILED
        except EngineError as error:
            parent.send(Failed(error.parts))
        except Exception as error:  # a bug, or the machine
            log.error("%s ends", what, exc_info=error)
            parent.send(Failed(EngineDeadError(f"run {what}", f"{type(error).__name__}: {error}").parts))
        parent.outbox.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait on sockets, and those of communicators, need no farewell


def _take_start(kind: Any, directory: str) -> Any:
    """The message from standard input, whose other end the parent keeps open.

    From then on the process leaves, and removes the directory, as soon as that end is closed: nobody is there any more
    to give orders or to read answers, and the device must be freed. So it does where that was before a whole message
    had come.
    """
    pipe = sys.stdin.buffer
    try:
        start = wire.decoder(kind).decode(wire.read_frame(pipe))
    except EOFError:
        _leave(directory)
    threading.Thread(target=_watch_parent, args=(pipe.fileno(), directory), name="parent", daemon=True).start()
    return start


def _watch_parent(pipe: int, directory: str) -> None:
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    _leave(directory)


def _leave(directory: str) -> NoReturn:
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(PARENT_DIED)
