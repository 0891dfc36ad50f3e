"""What this process holds."""

from __future__ import annotations

import gc
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_STATM = Path("/proc/self/statm")


class Memory(NamedTuple):
    """What this process holds.

    Args:
        resident_bytes: of main memory. Where the system tells only the most that there ever was, that.
        blocks: of memory that Python's objects take.
    """

    resident_bytes: int
    blocks: int


def memory_at_rest() -> Memory:
    """After a full collection of garbage."""
    gc.collect()
    return Memory(resident_bytes(), sys.getallocatedblocks())


def resident_bytes() -> int:
    """Bytes of main memory that this process takes now; the most that it ever took where only that is known."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
