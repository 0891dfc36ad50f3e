"""How much a rank has to do, in one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interfaces.router import RankLoad

WAITING_WEIGHT = 4
"""A waiting sequence counts like so many running ones, as in vLLM's load balancing between data-parallel ranks: it
still has its prompt before it, and ranks that queue are worse than ranks that are busy."""


def load_of(rank: RankLoad, kv_weight: float) -> float:
    """waiting x 4 + running + kv_weight x the part of the KV cache in use: long sequences weigh more than short ones,
    and a rank whose cache is nearly full is about to preempt."""
    return WAITING_WEIGHT * rank.num_waiting + rank.num_running + kv_weight * rank.kv_usage
