"""How the product of few rows is divided among programs, by its size."""

from __future__ import annotations

from typing import NamedTuple

from engine_cuda.ops_triton.launching import power_of_2

MOST_ROWS = 4
"""Rows that the kernel takes; more go to torch's product, whose tensor cores then have something to do."""
MOST_INPUTS = 16384
"""Inputs that the kernel takes: a row of them stays in registers."""
MOST_NORMED = 8192
"""Inputs that it takes where they are normed first, each row's before any is multiplied."""
VECTOR = 8
"""Elements that a thread reads at once: 16 bytes of 2 each."""


class MatrixCut(NamedTuple):
    """A launch's.

    Args:
        outputs: of a block; a power of 2.
        warps: of a program.
        programs: the most of a launch, each of which then takes several blocks; 0 for one a block.
    """

    outputs: int
    warps: int
    programs: int = 0

    def width(self, inputs: int) -> int:
        """Inputs of a piece: one read of 16 bytes for each thread."""
        return max(16, min(power_of_2(inputs), 32 * self.warps * VECTOR))

    def grid(self, outputs: int) -> tuple[int, bool]:
        """(programs, whether each takes one block)."""
        blocks = -(-outputs // self.outputs)
        return (self.programs, False) if 0 < self.programs < blocks else (blocks, True)


TABLE: tuple[tuple[int, MatrixCut], ...] = (
    # (inputs at most, cut). All of a small matrix is asked for at once; of a large one enough to keep reading.
    (1024, MatrixCut(outputs=4, warps=2)),
    (2048, MatrixCut(outputs=4, warps=4)),
    (4096, MatrixCut(outputs=4, warps=8)),
    (MOST_INPUTS, MatrixCut(outputs=2, warps=8)),
)


def cut_of(outputs: int, inputs: int, rows: int) -> MatrixCut:
    """For a matrix [outputs, inputs] and so many rows."""
    del rows
    return next(cut for most, cut in TABLE if inputs <= most)
