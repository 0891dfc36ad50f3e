"""Small evictors."""

from __future__ import annotations

import numpy as np
from cores import LAYOUTS

from engine.interfaces.context import CoreContext
from engine_reference.evictor_lru import LRU


def lru(num_pages: int) -> LRU:
    return LRU(
        CoreContext(
            layout=LAYOUTS["full"], max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, num_pages=num_pages
        )
    )


def array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)
