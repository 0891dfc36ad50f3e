"""How much of a device's memory goes to the KV pool. Arithmetic on what was measured; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.interfaces.platform import CacheMemory

DEFAULT_UTILIZATION = 0.9
"""The share of a GPU's memory that the engine takes where the user names none, as elsewhere in the field."""
GRAPH_BYTES = 8 << 20
"""What the driver keeps on the device for one captured step: its launches and their arguments. Graphs of some 300 to
500 launches were told of with 4 to 8 MiB; this is an estimate and no measurement of ours."""


class Measured(NamedTuple):
    """What a largest step showed, in bytes.

    Args:
        total: memory of the device.
        free: of the device, after the step, when torch's cache was given back.
        torch: that torch holds then: weights and buffers.
        outside: by which what others than torch hold grew since the platform was built: libraries' workspaces.
        step: that the step took at its peak beside all this.
    """

    total: int
    free: int
    torch: int
    outside: int
    step: int


def graph_bytes(step: int, buckets: Mapping[int, tuple[int, ...]], max_num_seqs: int) -> int:
    """Bytes that captured steps keep: their tensors, in one pool for all of them, and their launches.

    The tensors of the largest are at most the same share of the largest step's as the tokens that it draws for are of
    the rows that this one draws for: both tokens and logits are no more. One with prompts draws for all of
    these rows at most.

    buckets: row counts, by the tokens of a row; under 0: token counts of steps with prompts.
    """
    most = max((min(rows[-1], max_num_seqs) * (width or 1) for width, rows in buckets.items() if rows), default=0)
    return step * most // max_num_seqs + GRAPH_BYTES * sum(map(len, buckets.values()))


def cache_memory(measured: Measured, utilization: float | None, ranks: int, graphs: int) -> CacheMemory:
    """What is left for the pool. See `engine.interfaces.platform.Platform.kv_cache_memory`.

    The share is of all memory of the device; ranks that share it divide the share, and none takes more than is free.
    What other ranks hold outside torch cannot be told apart from this one's, so then it is not counted.

    Args:
        measured: by a largest step.
        utilization: None for the default.
        ranks: that share the device.
        graphs: bytes that captured steps will keep.
    """
    share = DEFAULT_UTILIZATION if utilization is None else utilization
    outside = measured.outside if ranks == 1 else 0
    budget = int(measured.total * share) // ranks - measured.torch - outside
    return CacheMemory(min(budget, measured.free) - measured.step - graphs, measured.step)
