"""`python -m tests.benchmarks eviction`: what an evictor is worth, on a seeded trace, beside the optimum.

The trace: tenants, each with a system prompt of its own, some asked far more often than others (Zipf); conversations
of several turns with think time between them, interleaved. Each turn's prompt is all that was said before it plus a
new question; its answer joins the conversation. A hit is a block of a prompt that is still in the cache. The optimum
is Belady's: give up the page whose next use lies farthest ahead, which needs the future (Belady, 1966).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from engine.interfaces.context import CoreContext
from engine.interfaces.evictor import Evictor
from engine.plugin import PluginList, Registry, load_body
from engine.types.errors import ConfigError
from engine.types.kv import KVLayout
from engine_bench.report import Report

NEVER = 1 << 60
_NO_PARENT = 0


@dataclass(frozen=True, kw_only=True)
class EvictionOptions:
    """What to measure: these drivers (none: all that are installed) at these numbers of pages, on one trace.

    Args:
        tenants, conversations, blocks_of_system, seed: see `make_trace`.
    """

    drivers: tuple[str, ...]
    sizes: tuple[int, ...]
    tenants: int
    conversations: int
    blocks_of_system: int
    seed: int


@dataclass(frozen=True)
class Turn:
    """One request.

    Args:
        path: the blocks of prompt and answer, by number; a number stands for one content after one prefix.
        num_prompt: how many of them are prompt.
    """

    path: tuple[int, ...]
    num_prompt: int


def make_trace(
    seed: int = 0, *, tenants: int = 24, conversations: int = 600, skew: float = 1.0, blocks_of_system: int = 24
) -> list[Turn]:
    """A trace in order of time.

    Args:
        seed: the same seed gives the same trace.
        tenants: system prompts.
        conversations: of 1 to some 12 turns (geometric, 4 on average).
        skew: the k-th tenant is asked in proportion to 1 / k ** skew.
        blocks_of_system: of the longest system prompt; each has at least a quarter of that.
    """
    rng = random.Random(seed)
    numbers = iter(range(1, NEVER))
    systems = [
        tuple(next(numbers) for _ in range(rng.randint(max(1, blocks_of_system // 4), blocks_of_system)))
        for _ in range(tenants)
    ]
    weights = [1 / (k + 1) ** skew for k in range(tenants)]
    turns: list[tuple[float, int, Turn]] = []
    for _ in range(conversations):
        path = list(rng.choices(systems, weights)[0])
        time = rng.uniform(0, conversations)
        while True:
            path += [next(numbers) for _ in range(rng.randint(1, 6))]
            num_prompt = len(path)
            path += [next(numbers) for _ in range(rng.randint(1, 8))]
            turns.append((time, len(turns), Turn(tuple(path), num_prompt)))
            if rng.random() < 0.25:
                break
            time += rng.expovariate(1 / 12)
    return [turn for _, _, turn in sorted(turns)]


class Cache(Protocol):
    """Where a replay keeps its blocks."""

    def lookup(self, path: Sequence[int]) -> int:
        """How many blocks from the front are there."""
        ...

    def insert(self, path: Sequence[int]) -> None:
        """Have all these blocks, giving up others where there is no room."""
        ...


def hit_rate(trace: Sequence[Turn], cache: Cache) -> float:
    """Found blocks of prompts over all blocks of prompts."""
    hits = total = 0
    for turn in trace:
        hits += min(cache.lookup(turn.path), turn.num_prompt)
        total += turn.num_prompt
        cache.insert(turn.path)
    return hits / total


class EvictorCache:
    """Pages and an index, with an evictor behind its interface."""

    def __init__(self, evictor: Evictor, num_pages: int) -> None:
        self._evictor = evictor
        self._page_of: dict[int, int] = {}
        self._block_of = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    def lookup(self, path: Sequence[int]) -> int:
        """See `Cache`."""
        return next((i for i, block in enumerate(path) if block not in self._page_of), len(path))

    def insert(self, path: Sequence[int]) -> None:
        """See `Cache`. What was found is held first, so that it is not given up for the rest."""
        found = self.lookup(path)
        held = [self._page_of[block] for block in path[:found]]
        if held:
            self._evictor.on_touch(np.array(held, np.int32))
        wanted = len(path) - found
        room = len(self._free) + len(self._evictor)
        if room < wanted:
            raise ValueError(f"a request of {len(path)} blocks does not fit a cache of {len(self._block_of) - 1}")
        if (missing := wanted - len(self._free)) > 0:
            for page in self._evictor.victims(missing, 0).tolist():
                del self._page_of[self._block_of[page]]
                self._free.append(page)
        pages = [self._free.pop() for _ in range(wanted)]
        for block, page in zip(path[found:], pages, strict=True):
            self._page_of[block] = page
            self._block_of[page] = block
        if pages:
            before = held[-1] if held else _NO_PARENT
            hashes = [block.to_bytes(32, "little") for block in path[found:]]
            self._evictor.on_commit(np.array(pages, np.int32), np.array([before, *pages[:-1]], np.int32), hashes)
        self._evictor.on_release(np.array([*held, *pages], np.int32))


class OptimalCache:
    """Belady's optimum: it knows the trace."""

    def __init__(self, trace: Sequence[Turn], num_pages: int) -> None:
        self._room = num_pages - 1
        self._next_use = _next_uses(trace)
        self._now = 0
        self._when: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def lookup(self, path: Sequence[int]) -> int:
        """See `Cache`."""
        return next((i for i, block in enumerate(path) if block not in self._when), len(path))

    def insert(self, path: Sequence[int]) -> None:
        """See `Cache`. Of blocks with the same next use the later ones of a path go first."""
        for depth, (block, use) in enumerate(zip(path, self._next_use[self._now], strict=True)):
            self._when[block] = use
            heapq.heappush(self._heap, (-use, -depth, block))
        self._now += 1
        while len(self._when) > self._room:
            use, _, block = heapq.heappop(self._heap)
            if self._when.get(block) == -use:
                del self._when[block]


def _next_uses(trace: Sequence[Turn]) -> list[list[int]]:
    """For each turn and block of it, the index of the next turn that asks for the block in its prompt."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for now in range(len(trace) - 1, -1, -1):
        turn = trace[now]
        uses.append([upcoming.get(block, NEVER) for block in turn.path])
        upcoming.update(dict.fromkeys(turn.path[: turn.num_prompt], now))
    return uses[::-1]


def build_evictor(registry: Registry, name: str, num_pages: int) -> Evictor:
    """A driver by name, with its default options. Raises PluginError where it cannot be had."""
    candidate = registry.find("evictor", name)
    card = registry.card(candidate)
    context = CoreContext(
        layout=KVLayout(block_size=1, page_bytes=1, tables=(), groups=()),
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=1,
        num_pages=num_pages,
        options=card.Options() if card.Options is not None else None,
    )
    return cast(Evictor, load_body(card, candidate=candidate)(context))


def compare(
    trace: Sequence[Turn], drivers: Sequence[str], sizes: Sequence[int], registry: Registry
) -> dict[str, list[float]]:
    """The hit rate of each driver, and of the optimum, for each number of pages."""
    rates = {
        name: [hit_rate(trace, EvictorCache(build_evictor(registry, name, size), size)) for size in sizes]
        for name in drivers
    }
    rates["optimum"] = [hit_rate(trace, OptimalCache(trace, size)) for size in sizes]
    return rates


def measure_eviction(options: EvictionOptions, plugins: PluginList | None = None) -> Report:
    """Run it, with the drivers that the list of plugins allows.

    Raises PluginError for a driver that cannot be had, ConfigError for a cache below one request.
    """
    registry = Registry.discover(plugins=plugins)
    drivers = options.drivers or tuple(candidate.name for candidate in registry.candidates("evictor"))
    trace = make_trace(
        options.seed,
        tenants=options.tenants,
        conversations=options.conversations,
        blocks_of_system=options.blocks_of_system,
    )
    longest = max(len(turn.path) for turn in trace)
    if min(options.sizes) <= longest:
        raise ConfigError(
            f"replay the trace with {min(options.sizes)} pages",
            f"its longest request has {longest} blocks, and one page is kept free",
            f"give more than {longest} pages",
        )
    distinct = len({block for turn in trace for block in turn.path})
    report = Report(f"eviction: {len(trace)} requests, {distinct:,} distinct blocks, longest {longest}", {})
    report.row("hit rate at pages", *(f"{size:,}" for size in options.sizes))
    for name, rates in compare(trace, drivers, options.sizes, registry).items():
        report.row(name, *(f"{100 * rate:.1f} %" for rate in rates))
        report.figures |= {f"hit_rate_{name}_{size}": rate for size, rate in zip(options.sizes, rates, strict=True)}
    return report
