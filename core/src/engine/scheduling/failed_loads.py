"""Loads that failed: whose tokens are made of pages that hold nothing, so that these requests are computed again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.kv.manager import KVManager
from engine.scheduling.request import Request
from engine.scheduling.slots import SlotTable


def spoilt(
    failed_pages: np.ndarray,
    step_id: int,
    running: Iterable[Request],
    draining: Iterable[Request],
    slots: SlotTable,
    kv: KVManager,
) -> list[Request]:
    """Requests that read these pages in the step `step_id` or in one after it, or pages that were computed from them.

    Rather too many than too few: with a request all its pages count as spoilt, and a request that has no pages any more
    counts where a step since then named it.
    """
    found = [request for request in draining if slots.last_step[request.slot] >= step_id]
    bad = np.zeros(kv.pool.num_pages, bool)
    bad[failed_pages] = True
    left = {request: _pages(request.slot, kv) for request in running}
    while more := [request for request, pages in left.items() if bad[pages].any()]:
        for request in more:
            bad[left.pop(request)] = True
        found += more
    return found


def _pages(slot: int, kv: KVManager) -> np.ndarray:
    """Those that left a sliding window too: entries stay in the table until they are written anew."""
    return np.concatenate([table.pages[slot, : table.num_blocks[slot]] for table in kv.tables])
