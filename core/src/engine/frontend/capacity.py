"""How much the KV cache of a started engine holds, and what is broken in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv.tables import BlockTable

if TYPE_CHECKING:
    from engine.frontend.launch import Launch
    from engine.types.start import BrokenPlugin, WorkerReady


def broken_plugins(launch: Launch, worker: WorkerReady | None) -> tuple[BrokenPlugin, ...]:
    """The plugins that were left out, in this process or in another; `worker`: what these told when they were ready."""
    return tuple(dict.fromkeys((*launch.registry.broken(), *(worker.broken if worker is not None else ()))))


def capacity(launch: Launch, worker: WorkerReady) -> tuple[int, float]:
    """How much the KV cache holds.

    Returns:
        Tokens (of requests at full length, where layers of several kinds share the pool), and how many requests of
        `max_model_len` tokens fit at once; (0, as many as run) for a model that keeps nothing.
    """
    start = launch.start.worker
    tables = start.layout.growing  # without encoder inputs, whose length is unknown
    if not tables:
        return 0, float(start.max_num_seqs)
    pages = worker.num_pages - 1  # the null page belongs to nobody
    chunk = min(start.max_num_batched_tokens, start.max_model_len)
    each = sum(BlockTable(table, 1, start.max_model_len).most_live(start.max_model_len, chunk) for table in tables)
    one_kind = len(tables) == 1 and tables[0].window is None
    return pages * tables[0].tokens_per_block if one_kind else pages * start.max_model_len // each, pages / each


def longest(launch: Launch, worker: WorkerReady) -> tuple[int, int]:
    """The most tokens, up to `max_model_len`, of a request for which the KV cache has room, and how many pages one of
    `max_model_len` needs at once; none for a model that keeps nothing."""
    start = launch.start.worker
    tables = start.layout.growing

    def needed(length: int) -> int:
        chunk = min(start.max_num_batched_tokens, length)
        return sum(BlockTable(table, 1, length).most_live(length, chunk) for table in tables)

    fits, above = 0, start.max_model_len + 1
    while tables and fits + 1 < above:
        middle = (fits + above) // 2
        fits, above = (middle, above) if needed(middle) < worker.num_pages else (fits, middle)
    return (fits, needed(start.max_model_len)) if tables else (start.max_model_len, 0)
