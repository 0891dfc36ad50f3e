"""The map of the KV cache: a class for each page, by who holds it."""

from __future__ import annotations

from typing import Any

import numpy as np

FREE, CACHED, ONE, TWO, FEW, MANY = range(6)
"""Free; held by nobody, and kept for the next prompt that begins alike; held by one sequence, by two, by three or four,
by five and more."""

LEAST_DRAWN = 512
"""Pages that the map has at least: from there it grows to the powers of two."""

_BY_HOLDERS = np.full(256, MANY, np.uint8)
_BY_HOLDERS[:5] = (FREE, ONE, TWO, FEW, FEW)


def summary(holders: np.ndarray, cached: np.ndarray, most_cells: int) -> dict[str, Any]:
    """How many pages are of each class, and the map.

    Args:
        holders: uint8 [pages]; reference counts.
        cached: uint8 [pages]; 1 where the prefix cache can find the page.
        most_cells: of the map; where there are more pages to draw, each cell stands for as many that follow one
            another, and is of the class of the most shared of them.

    Returns:
        `total` pages; `counts` of pages by class; `drawn`: how many pages, from the first, the map holds (those after
        them are free: low numbers are given out first); `per_cell` pages a cell; `cells`: a digit (the class) for each;
        `saved`: pages that would be needed on top if nothing were shared.
    """
    classes = np.maximum(_BY_HOLDERS[holders], cached)  # cached is 1, which is CACHED; who is held is above it
    used = int(np.flatnonzero(classes)[-1]) + 1 if classes.any() else 0
    drawn = min(classes.size, max(LEAST_DRAWN, 1 << max(0, used - 1).bit_length()))
    per_cell = max(1, -(-drawn // most_cells))
    cells = np.maximum.reduceat(classes[:drawn], np.arange(0, drawn, per_cell)) if drawn else classes
    shared = holders[holders > 1].astype(np.int64)
    return {
        "total": int(classes.size),
        "counts": np.bincount(classes, minlength=MANY + 1).tolist(),
        "drawn": int(drawn),
        "per_cell": per_cell,
        "cells": (cells + ord("0")).tobytes().decode("ascii"),
        "saved": int((shared - 1).sum()),
    }
