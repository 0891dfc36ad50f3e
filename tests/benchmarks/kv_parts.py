"""Two parts of the KV manager by themselves: pages through an evictor, and the hashes of a long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.kv.hashing import extend_hashes, root_hash
from tests.benchmarks.eviction import build_evictor

if TYPE_CHECKING:
    from engine.interfaces.evictor import Evictor
    from engine.plugin import Registry

PAGES_PER_CALL = 64
_PAGES, _CALLS = 16384, 4096
PROMPT = 32768
_PROMPTS = 20


class Times(NamedTuple):
    """Seconds.

    Args:
        best, median: of the measurements, of the wall clock.
        cpu: of all measurements together, of the processor, for each of them.
    """

    best: float
    median: float
    cpu: float


def time_evictor(registry: Registry, name: str, seed: int) -> Times:
    """What one page costs on its way through an evictor, in calls of 64: given up as a victim, named for another block,
    and released again. All other pages are evictable meanwhile."""
    evictor = build_evictor(registry, name, _PAGES)
    pages = np.random.default_rng(seed).permutation(np.arange(1, _PAGES, dtype=np.int32))
    pages = pages[: pages.size // PAGES_PER_CALL * PAGES_PER_CALL]
    names = [number.to_bytes(32, "little") for number in range(pages.size + _CALLS * PAGES_PER_CALL)]
    hashes = iter([names[start : start + PAGES_PER_CALL] for start in range(0, len(names), PAGES_PER_CALL)])
    for start in range(0, pages.size, PAGES_PER_CALL):
        _cached(evictor, pages[start : start + PAGES_PER_CALL], next(hashes))
    times = _timed(lambda: _cached(evictor, evictor.victims(PAGES_PER_CALL, 0), next(hashes)), _CALLS)
    evictor.check_integrity()
    assert len(evictor) == pages.size
    return Times(*(value / PAGES_PER_CALL for value in times))


def _cached(evictor: Evictor, pages: np.ndarray, hashes: Sequence[bytes]) -> None:
    """These pages hold the blocks of a sequence, one after the other, which ended; hashes: one for each."""
    parents = np.concatenate([np.zeros(1, np.int32), pages[:-1]])
    evictor.on_commit(pages, parents, hashes)
    evictor.on_release(pages)


def time_hashing(block_size: int, seed: int) -> Times:
    """The hashes of a prompt of 32768 tokens."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, PROMPT, dtype=np.int32)

    def hashes() -> None:
        of_prompt: list[bytes] = []
        extend_hashes(of_prompt, root_hash(None), tokens, block_size)
        assert len(of_prompt) == PROMPT // block_size

    return _timed(hashes, _PROMPTS)


def _timed(call: Callable[[], None], times: int) -> Times:
    seconds = []
    cpu = time.thread_time()
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    cpu = time.thread_time() - cpu
    return Times(min(seconds), float(np.median(seconds)), cpu / times)
