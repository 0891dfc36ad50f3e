"""Starting an engine core again that has died: so many times, with growing pauses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine.interfaces.client import OneCore
from engine.types.errors import EngineError, NodeMissingError

log = logging.getLogger("engine.parallel")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds before a start; twice as many before each further one. What killed a core may need time to go away."""


class Restarts:
    """What is left of one rank's restarts. `start` runs on a thread of its own, `stop` and `shutdown` on any other.

    Args:
        connect: starts the core.
        most: starts in this rank's life; one that fails counts.
    """

    def __init__(self, connect: Callable[[], OneCore], most: int) -> None:
        self._connect = connect
        self._left = most
        self._pause = FIRST_PAUSE
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._starting: OneCore | None = None

    def start(self) -> OneCore | None:
        """Wait, and start a core until one is ready. None where none is left, or `stop` was called."""
        waited = False
        while self._left > 0:
            self._left -= 1
            if self._stopped.wait(self._pause):
                return None
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            try:
                core = self._connect()  # takes its time on another machine: `stop` does not wait for it
                with self._lock:
                    self._starting = core
                    if self._stopped.is_set():
                        core.ask_to_stop()
                        return None
                core.wait_ready()
                return core
            except NodeMissingError as error:  # nothing was tried: its machine is waited for
                if not waited:
                    log.error("an engine core cannot be started again yet: %s", error)
                waited = True
                self._left += 1
                self._pause = FIRST_PAUSE
            except (EngineError, OSError) as error:
                if not self._stopped.is_set():
                    log.error("an engine core could not be started again: %s; %d tries are left", error, self._left)
        return None

    def stop(self) -> None:
        """Start nothing any more; a core that is being started ends. Does not wait."""
        with self._lock:
            self._stopped.set()
            if self._starting is not None:
                self._starting.ask_to_stop()

    def shutdown(self) -> None:
        """Free what the last start has left, if nobody has. Idempotent."""
        with self._lock:
            if self._starting is not None:
                self._starting.shutdown()
