"""The statistics of several engine cores as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from engine.types.outputs import StepStats
from engine.types.start import WorkerReady
from engine_kit.ranks import merge_ready, sum_named

_LATEST = frozenset({"step_id"})
"""Fields of which the largest counts; all others are summed."""


def merge_stats(several: Sequence[StepStats]) -> StepStats | None:
    """Sums over all engine cores; of step ids the largest. None where there are none."""
    if len(several) < 2:
        return several[0] if several else None
    merged: dict[str, Any] = {}
    for name in StepStats.__struct_fields__:
        values = [getattr(stats, name) for stats in several]
        if name in ("hook_failures", "kv_connectors", "retained_pages", "retention_events"):
            merged[name] = sum_named(values)
        elif name == "accepted_drafts_at":
            merged[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            merged[name] = max(values) if name in _LATEST else sum(values)
    return StepStats(**merged)


def counters(stats: StepStats | None) -> StepStats | None:
    """What is left of a dead core's statistics: nothing runs any more, and it has no cache."""
    state = ("num_running", "num_waiting", "num_tokens", "pages_used", "pages_total")
    swap = ("num_swapped", "swap_pages_used", "swap_pages_total")
    return None if stats is None else replace(stats, **dict.fromkeys(state + swap, 0), retained_pages=())


def merge_cores(several: Sequence[WorkerReady]) -> WorkerReady:
    """The core with the smallest cache stands for all; they are ready when the slowest is, and what one of them found
    broken is broken."""
    smallest, merged = min(several, key=lambda ready: ready.num_pages), merge_ready(several)
    return replace(smallest, load_seconds=merged.load_seconds, broken=merged.broken, hook_failures=merged.hook_failures)
