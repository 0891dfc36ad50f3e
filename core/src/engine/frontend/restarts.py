"""Starting an engine core again that has died: so many times, with growing pauses."""

from __future__ import annotations

import logging
import threading

from engine.frontend.core_process import CoreProcess
from engine.types.errors import EngineError
from engine.types.start import CoreStart

log = logging.getLogger("engine.frontend")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds before a start; twice as many before each further one. What killed a core may need time to go away."""


class Restarts:
    """What is left of one rank's restarts. `start` runs on a thread of its own, `stop` and `shutdown` on any other.

    Args:
        start: of the core.
        most: starts in this rank's life; one that fails counts.
    """

    def __init__(self, start: CoreStart, most: int) -> None:
        self._start, self._left = start, most
        self._pause = FIRST_PAUSE
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._starting: CoreProcess | None = None

    def start(self) -> CoreProcess | None:
        """Wait, and start a core until one is ready. None where none is left, or `stop` was called."""
        while self._left > 0:
            self._left -= 1
            if self._stopped.wait(self._pause):
                return None
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            try:
                with self._lock:
                    if self._stopped.is_set():
                        return None
                    core = self._starting = CoreProcess(self._start)
                core.wait_ready()
                return core
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
