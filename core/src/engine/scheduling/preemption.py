"""Where pages are short: who goes on, how often somebody was preempted, and the warning that users of vLLM know."""

from __future__ import annotations

import logging

import numpy as np

logger = logging.getLogger(__name__)

WARN_EVERY = 50
"""The first preemption is told, and then every fiftieth."""


class Preemptions:
    """How often requests lost their pages, by what became of these.

    Attributes:
        num_swapped: kept by the swap tier.
        num_recomputed: given up, to be computed again.
        num_swap_full: of those recomputed, the ones that the swap tier had no room for.
    """

    def __init__(self) -> None:
        self.num_swapped = self.num_recomputed = self.num_swap_full = 0

    def count(self, request_id: str, swapped: bool, swap_full: bool = False) -> None:
        """A request was preempted; `swap_full`: it should have been swapped, and there was no room."""
        self.num_swapped += swapped
        self.num_recomputed += not swapped
        self.num_swap_full += swap_full
        total = self.num_swapped + self.num_recomputed
        if total % WARN_EVERY == 1:
            logger.warning(
                "request %s is preempted by mode %s because there is not enough KV cache space; this costs throughput. "
                "Raise --kv-cache-memory, or lower --max-num-seqs. Cumulative preemptions: %d",
                request_id,
                "swap" if swapped else "recompute",
                total,
            )
        if swap_full and self.num_swap_full % WARN_EVERY == 1:
            logger.warning(
                "the swap space is full: request %s will be computed again instead. Raise --swap-space. So far: %d",
                request_id,
                self.num_swap_full,
            )


def oldest_that_fit(order: np.ndarray, need: np.ndarray, available: int) -> np.ndarray:
    """bool [n]; the rows that need no page, and the longest admitted of the others for which pages are there.

    Args:
        order: int [n]; of admission.
        need: bool [groups, n]; which rows need a page.
        available: pages.
    """
    oldest = np.argsort(order)
    pages = np.count_nonzero(need, axis=0)[oldest]
    keep = np.empty(order.size, bool)
    keep[oldest] = (np.cumsum(pages) <= available) | (pages == 0)
    return keep
