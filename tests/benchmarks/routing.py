"""`python -m tests.benchmarks routing`: what a router is worth, on the trace of `eviction`, over simulated ranks.

A rank is a cache of pages behind the evictor in use, a server that computes one prompt after the other (what it found
in its cache it need not compute), and answers that come at an even pace beside them. The router is the real driver: it
sees the loads that a frontend would tell it. Time is simulated, so that nothing depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from engine.interfaces.context import RouterContext
from engine.interfaces.router import RankLoad, Router
from engine.plugin import Registry, choose_one, load_body
from engine.plugin.points import EVICTOR
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_bench.report import Report
from tests.benchmarks.eviction import EvictorCache, Turn, build_evictor, make_trace

if TYPE_CHECKING:
    from engine.embedding import EngineConfig

PREFILL_SECONDS = 0.005
"""To compute a block of a prompt: 16 tokens at 3,200 tokens a second."""
DECODE_SECONDS = 0.32
"""To generate a block of an answer: 16 tokens at 50 tokens a second."""


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """What to measure: these routers (none: all that are installed) over so many ranks of so many pages each.

    Args:
        load: how busy computing prompts would keep the ranks if nothing were found in a cache; 1 is all of the time.
        tenants, conversations, blocks_of_system, seed: see `make_trace`.
    """

    routers: tuple[str, ...]
    ranks: int
    pages: int
    load: float
    tenants: int
    conversations: int
    blocks_of_system: int
    seed: int


@dataclass
class SimulatedRank:
    """One engine core."""

    cache: EvictorCache
    pages: int
    free_at: float = 0.0
    """When it has computed all prompts that it was sent."""
    worked: float = 0.0
    """Seconds of prompts computed."""
    unfinished: list[tuple[float, float, int]] = field(default_factory=list)
    """(when the first token comes, when the last one does, blocks)."""

    def load(self, rank: int, now: float) -> RankLoad:
        """As the frontend would tell it."""
        self.unfinished = [request for request in self.unfinished if request[1] > now]
        waiting = sum(first > now for first, _, _ in self.unfinished)
        held = sum(blocks for _, _, blocks in self.unfinished)
        return RankLoad(rank, len(self.unfinished) - waiting, waiting, min(1.0, held / self.pages))

    def take(self, turn: Turn, now: float) -> tuple[int, float]:
        """Serve a request. Returns the blocks of its prompt that were found, and the seconds to its first token."""
        found = min(self.cache.lookup(turn.path), turn.num_prompt)
        self.cache.insert(turn.path)
        seconds = (turn.num_prompt - found) * PREFILL_SECONDS
        self.worked += seconds
        first = self.free_at = max(now, self.free_at) + seconds
        last = first + (len(turn.path) - turn.num_prompt) * DECODE_SECONDS
        self.unfinished.append((first, last, len(turn.path)))
        return found, first - now


@dataclass(frozen=True)
class Outcome:
    """Of one replay.

    Args:
        hit_rate: found blocks of prompts over all blocks of prompts.
        mean, p95: seconds to the first token.
        imbalance: the work of the rank that had most of it, over the ranks' mean; 1 is even.
    """

    hit_rate: float
    mean: float
    p95: float
    imbalance: float


def replay(trace: Sequence[Turn], arrivals: Sequence[float], ranks: Sequence[SimulatedRank], router: Router) -> Outcome:
    """Send every request at its time to the rank that the router names. One rank needs no router."""
    hits, waits = 0, []
    for turn, now in zip(trace, arrivals, strict=True):
        chosen = 0
        if len(ranks) > 1:
            tokens = list(turn.path[: turn.num_prompt])  # blocks of one token: a block's number stands for its content
            request = EngineRequest(request_id="", prompt_token_ids=tokens, params=SamplingParams())
            chosen = router.route([request], [rank.load(i, now) for i, rank in enumerate(ranks)])
        found, wait = ranks[chosen].take(turn, now)
        hits += found
        waits.append(wait)
    waits.sort()
    worked = [rank.worked for rank in ranks]
    return Outcome(
        hit_rate=hits / sum(turn.num_prompt for turn in trace),
        mean=sum(waits) / len(waits),
        p95=waits[int(0.95 * (len(waits) - 1))],
        imbalance=max(worked) * len(worked) / sum(worked),
    )


def make_arrivals(trace: Sequence[Turn], ranks: int, load: float, seed: int) -> list[float]:
    """Poisson arrivals at the rate of that load."""
    rng = random.Random(seed)
    work = PREFILL_SECONDS * sum(turn.num_prompt for turn in trace) / len(trace)
    now, times = 0.0, []
    for _ in trace:
        now += rng.expovariate(load * ranks / work)
        times.append(now)
    return times


def build_router(registry: Registry, name: str, ranks: int, pages: int) -> Router:
    """A driver by name, with its default options. Raises PluginError where it cannot be had."""
    candidate = registry.find("router", name)
    card = registry.card(candidate)
    context = RouterContext(
        num_ranks=ranks,
        max_num_seqs=256,
        block_size=1,
        cached_tokens=pages,
        options=card.Options() if card.Options is not None else None,
    )
    return cast(Router, load_body(card, candidate=candidate)(context))


def measure_routing(config: EngineConfig, options: RoutingOptions) -> Report:
    """Run it. Raises PluginError for a driver that cannot be had, ConfigError for numbers that make no sense."""
    registry = Registry.discover(plugins=config.plugin_list)
    names = options.routers or tuple(candidate.name for candidate in registry.candidates("router"))
    asked, given = config.asked("evictor"), config.options_for("evictor")
    evictor = choose_one(registry, EVICTOR, None, asked, given).candidate.name
    trace = make_trace(
        options.seed,
        tenants=options.tenants,
        conversations=options.conversations,
        blocks_of_system=options.blocks_of_system,
    )
    longest = max(len(turn.path) for turn in trace)
    if options.pages <= longest:
        raise ConfigError(
            f"replay the trace with {options.pages} pages a rank",
            f"its longest request has {longest} blocks, and one page is kept free",
            f"give more than {longest} pages",
        )
    arrivals = make_arrivals(trace, options.ranks, options.load, options.seed)
    distinct = len({block for turn in trace for block in turn.path})
    machine = f"{options.ranks} ranks of {options.pages:,} pages, evictor {evictor}"
    report = Report(f"routing: {len(trace)} requests, {distinct:,} distinct blocks, {machine}", {})
    report.row("router", "hit rate", "mean TTFT", "p95 TTFT", "busiest rank")

    def simulate(name: str, count: int, pages: int) -> Outcome:
        caches = [EvictorCache(build_evictor(registry, evictor, pages), pages) for _ in range(count)]
        ranks = [SimulatedRank(cache, pages) for cache in caches]
        return replay(trace, arrivals, ranks, build_router(registry, name, count, pages))

    for name in names:
        outcome = simulate(name, options.ranks, options.pages)
        report.row(
            name,
            f"{100 * outcome.hit_rate:.1f} %",
            f"{1e3 * outcome.mean:.0f} ms",
            f"{1e3 * outcome.p95:.0f} ms",
            f"{outcome.imbalance:.2f} x mean",
        )
        report.figures |= {
            f"hit_rate_{name}": outcome.hit_rate,
            f"mean_ttft_{name}": outcome.mean,
            f"p95_ttft_{name}": outcome.p95,
            f"imbalance_{name}": outcome.imbalance,
        }
    shared = simulate(names[0], 1, options.ranks * (options.pages - 1) + 1)
    report.row("one cache for all", f"{100 * shared.hit_rate:.1f} %")
    report.figures["hit_rate_one_cache"] = shared.hit_rate
    return report
