"""A system clock that somebody sets all the time, by hours, forward and back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

JUMPS = (0.0, 7200.0, -7200.0, 86400.0, -3.0e6, 3.0e7)
_TRUE = time.time


def jumping() -> Callable[[], float]:
    """A `time.time` that is right in the middle, and otherwise off by the next of `JUMPS` at every call."""
    jumps = itertools.cycle(JUMPS)
    return lambda: _TRUE() + next(jumps)
