"""What the two halves say to each other about one step. No torch."""

from __future__ import annotations

import msgspec
import numpy as np


class Copies(msgspec.Struct, kw_only=True):
    """Copies between pages of the pool and places in host memory; those out come first.

    Args:
        out_page, out_place: int32 [m]; place out_place[i] gets what page out_page[i] holds.
        in_page, in_place: int32 [n]; page in_page[i] gets what place in_place[i] holds.
    """

    out_page: np.ndarray
    out_place: np.ndarray
    in_page: np.ndarray
    in_place: np.ndarray
