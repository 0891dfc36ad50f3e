"""The time of day, as it goes on from the engine's start: a clock that is set does not touch it."""

from __future__ import annotations

import time


class SteadyClock:
    """Reads as `time.time()` did when it was made, and from then on counts with `time.monotonic()`.

    Requests are put in order by when they arrived, and durations are told from it: a system clock that is set, by hours
    or to the past, must change neither.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch; never less than before."""
        return self._offset + time.monotonic()

    def monotonic(self, when: float) -> float:
        """A time that `now` tells, by the monotonic clock; no later than the present."""
        return min(when - self._offset, time.monotonic())
