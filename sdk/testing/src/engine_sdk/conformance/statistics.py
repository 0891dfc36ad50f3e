"""Whether counts come from a distribution."""

from __future__ import annotations

import math

import numpy as np

RARE = 1e-4
"""The suites draw the same numbers each time, so a right driver passes for ever; a wrong one is far below."""


def chi_square_tail(observed: np.ndarray, expected: np.ndarray) -> float:
    """The probability of a larger chi-square, by a normal approximation of its cube root (Wilson, Hilferty 1931).

    Counts of cells that should be empty and are not give 0. Cells that expect fewer than 5 are put together.
    """
    if observed[expected <= 0].sum() > 0:
        return 0.0
    few = (expected > 0) & (expected < 5)
    many = expected >= 5
    cells = [(observed[many], expected[many])]
    if few.any():
        cells.append((observed[few].sum(keepdims=True), expected[few].sum(keepdims=True)))
    seen, wanted = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    if len(seen) < 2:
        return 1.0
    statistic, df = float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))
