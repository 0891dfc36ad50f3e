"""What lies where in the memory that each rank shows to the others, and how a sum is cut into rounds."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = 64
"""Most programs of a launch: all of them run at once on any GPU that this is for, since each waits for its like."""
MOST_RANKS = 8
PAGE = 2 << 20
"""What CUDA shows to another process is whole pages of this size."""
SMALL, LARGE, SEGMENT = 4096, 16384, 8192
"""Bytes that a program sums at a time: of small and of large tensors in one shot, and of each rank's share in two."""

FLAGS = 0
STATE = FLAGS + BLOCKS * MOST_RANKS * 8
DATA = STATE + BLOCKS * 8
"""Where things begin, in bytes: a flag (int64) for each program and rank that signals; each program's counter (int64);
and, for each program, two slots for its rank's numbers."""


@dataclass(frozen=True)
class Layout:
    """Of a group of `size` ranks."""

    size: int

    @property
    def slot(self) -> int:
        """Bytes of a slot: what a program takes of its rank's tensor in one round."""
        return max(LARGE, self.size * SEGMENT)

    @property
    def results(self) -> int:
        """Where each program's share of a sum lies, `SEGMENT` bytes each."""
        return DATA + BLOCKS * 2 * self.slot

    @property
    def nbytes(self) -> int:
        """All of it, in whole pages."""
        return -(-(self.results + BLOCKS * SEGMENT) // PAGE) * PAGE


@dataclass(frozen=True)
class Cut:
    """How one tensor is summed.

    Args:
        one_shot: every rank adds up everything; else its share alone, which the others take.
        block: elements that a program adds up at a time.
        programs: of the launch.
        warps: of a program: each thread moves 16 bytes at a time.
    """

    one_shot: bool
    block: int
    programs: int
    warps: int


def cut(count: int, itemsize: int, size: int, one_shot_bytes: int) -> Cut:
    """For `count` elements, at least one. The same on all ranks."""
    nbytes = count * itemsize
    if nbytes <= one_shot_bytes:
        tile = SMALL if nbytes <= BLOCKS * SMALL else LARGE
        return Cut(True, tile // itemsize, min(BLOCKS, -(-nbytes // tile)), 8 if tile == SMALL else 16)
    return Cut(False, SEGMENT // itemsize, min(BLOCKS, -(-nbytes // (size * SEGMENT))), 16)
