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


def log_probability_tail(drawn: np.ndarray, probs: np.ndarray) -> float:
    """The probability of a sum of log q(x) farther from the expected one, either way, by a normal approximation.

    Each draw is held against its own distribution, so one that is sharper or flatter than what was drawn from shows
    in far fewer draws than in counts, where different distributions blur each other.

    Args:
        drawn: integers [n].
        probs: [n, V], the distribution of each draw. A draw that has probability 0 there gives 0.
    """
    own = probs[np.arange(len(drawn)), drawn]
    if (own <= 0).any():
        return 0.0
    logs = np.log(np.where(probs > 0, probs, 1.0))
    mean = (probs * logs).sum(axis=1)
    variance = float((probs * (logs - mean[:, None]) ** 2).sum())
    away = abs(float((np.log(own) - mean).sum()))
    return math.erfc(away / math.sqrt(2 * variance)) if variance > 0 else 1.0
