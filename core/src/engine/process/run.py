"""What a process that `Child` starts does: hear its start message and its parent, and leave when that has gone."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from engine.process.wire import Link, Parent, decoder, read_frame, remove_directory
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Failed

log = logging.getLogger("engine.process")

FAILED = 1
"""The exit code of a process that told why it ends."""
PARENT_DIED = 3
"""The exit code of a process whose parent has gone."""


def run(what: str, start: Any, heard: Any, main: Callable[[Any, Parent[Any]], int]) -> NoReturn:
    """Be the child: call `main` with the start message and the parent, and leave with the exit code that it returns.

    What it raises is told to the parent, whatever it is. Ctrl-C and a terminal are the parent's business; a crash, or
    SIGUSR1, which a parent sends to a child that hangs, write the stacks of all threads to standard error.

    Args:
        what: this process is, for errors: "the engine core".
        start: the type of the start message.
        heard: the type of what the parent says later: a union of tagged structs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it writes to a terminal from the background
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # comes with SIGCONT, where its parent ends while it is stopped
    directory = sys.argv[1]
    link, message = _take_start(start, directory)
    parent: Parent[Any] = Parent(heard, directory, link)
    closing = threading.Event()
    threading.Thread(target=_watch_parent, args=(directory,), name="parent", daemon=True).start()
    if link.outputs:
        watch = threading.Thread(target=_watch_link, args=(parent, link, closing), name="link", daemon=True)
        watch.start()
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
        closing.set()
        parent.outbox.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if link.outputs:  # whoever started it may have gone by now
        remove_directory(directory)
    if select.select([sys.stdin], [], [], 0)[0]:  # `_watch_parent` may be in the midst of it
        _leave(directory)
    os._exit(code)  # threads that wait on sockets, and those of communicators, need no farewell


def _take_start(kind: Any, directory: str) -> tuple[Link, Any]:
    """The messages from standard input, whose other end the parent keeps open: see `_watch_parent`. The process leaves
    where that is closed before both have come whole."""
    try:
        link: Link = decoder(Link).decode(read_frame(sys.stdin.buffer))
        return link, decoder(kind).decode(read_frame(sys.stdin.buffer))
    except EOFError:
        _leave(directory)


def _watch_parent(directory: str) -> None:
    """Leave, and remove the directory, as soon as the parent's end of standard input is closed: nobody is there any
    more to give orders or to read answers, and the device must be freed."""
    pipe = sys.stdin.fileno()
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    _leave(directory)


def _watch_link(parent: Parent[Any], link: Link, closing: threading.Event) -> None:
    """The same where the parent is on another machine: the connection to it is the pipe."""
    parent.outbox.wait_until_lost()
    if not closing.is_set():
        log.error("the connection to the parent process, at %s, was lost", link.outputs)
        _leave(parent.directory)


def _leave(directory: str) -> NoReturn:
    remove_directory(directory)
    os._exit(PARENT_DIED)
