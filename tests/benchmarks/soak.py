"""`python -m tests.benchmarks soak`: a great many requests through an engine core without a model.

Every request must end exactly once, as it should, with as many tokens as it asked for; now and then the core runs
empty, and then no page may be missing and no memory may be left over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.types.errors import EngineError
from engine.types.outputs import CoreOutput
from engine.types.request import FinishReason
from engine_bench.report import Report
from tests.benchmarks.memory import Memory, memory_at_rest, resident_bytes
from tests.benchmarks.null_core import SLIDING_WINDOW, VOCABULARY, NullSizes, null_core
from tests.benchmarks.null_requests import LONGEST_OUTPUT, LONGEST_PROMPT, Ask, RequestSource

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.loop.engine_core import EngineCore

ROUNDS = 10
"""So often the core runs empty and is checked; the first round warms up, and no memory is compared with its begin."""
_DRAWN_AT_ONCE = 1000
_PAGES_EACH = 3
"""Of 16 tokens, for each running request and KV table: less than they ask for when many are long."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run.

    Args:
        requests: in all.
        running: slots; as many more requests wait.
        drafts, kv_tables: see `tests.benchmarks.null_core`.
    """

    requests: int
    running: int
    drafts: int = 0
    kv_tables: int = 1


class Ledger:
    """Every request from its begin to its end.

    Attributes:
        ended: how many ended, by reason.
        tokens: of all requests.
    """

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.ended = dict.fromkeys((FinishReason.LENGTH, FinishReason.ABORT), 0)
        self.tokens = 0
        self._asked: dict[str, int] = {}
        self._aborted: set[str] = set()

    def begin(self, ask: Ask) -> None:
        """It is about to be queued."""
        self.open[ask.request.request_id] = 0
        self._asked[ask.request.request_id] = ask.output_len

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Those of these requests that have not ended: they may end with "abort" from here on."""
        found = [request_id for request_id in request_ids if request_id in self.open]
        self._aborted.update(found)
        return found

    def take(self, outputs: list[CoreOutput]) -> None:
        """News of one step. Raises EngineError where a request gets anything after its end, or a wrong end."""
        still = self.open
        for output in outputs:
            request_id = output.request_id
            if request_id not in still:
                raise _wrong(request_id, "it got an output after its end")
            n = len(output.new_token_ids)
            self.tokens += n
            if output.finish_reason is None:
                still[request_id] += n
            else:
                self._end(request_id, still.pop(request_id) + n, output)

    def _end(self, request_id: str, got: int, output: CoreOutput) -> None:
        asked, reason = self._asked.pop(request_id), output.finish_reason
        right = got == asked if reason is FinishReason.LENGTH else got < asked
        if reason is FinishReason.ABORT:
            right = right and request_id in self._aborted
        if not right or reason not in self.ended:
            raise _wrong(request_id, f"it ended with {reason!s} after {got} of {asked} tokens: {output.error}")
        self._aborted.discard(request_id)
        self.ended[reason] += 1


def _wrong(request_id: str, found: str) -> EngineError:
    return EngineError(f"serve request {request_id}", found, "this is a bug in the engine: report it")


def run_soak(config: EngineConfig, options: SoakOptions) -> Report:
    """Run it.

    Raises:
        EngineError, AssertionError: a request, a page or memory is lost.
        PluginError: a driver cannot be had.
    """
    core = null_core(config, _sizes(config, options))
    source, ledger = RequestSource(VOCABULARY, config.seed), Ledger()
    rest: list[Memory] = []
    peak = 0
    began, cpu = time.perf_counter(), time.process_time()
    try:
        left = options.requests
        for round_ in range(ROUNDS):
            count = left // (ROUNDS - round_)
            left -= count
            peak = max(peak, _run(core, source, ledger, count, 2 * options.running))
            assert not ledger.open and core.stats().pages_used == 0
            core.check_integrity()
            rest.append(memory_at_rest())
        stats, evicted = core.stats(), core.scheduler.kv.pool.num_evicted
    finally:
        core.shutdown()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert sum(ledger.ended.values()) == options.requests and stats.num_running == stats.num_waiting == 0
    warm, last = rest[0], rest[-1]
    report = Report(
        f"{options.requests} requests through an engine core without a model, {options.running} at a time",
        {
            "bench": "soak",
            "requests": options.requests,
            "running": options.running,
            "drafts": options.drafts,
            "kv_tables": options.kv_tables,
            "pages": stats.pages_total,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "requests_per_s": options.requests / seconds,
            "cpu_us_per_request": cpu / options.requests * 1e6,
            "steps": stats.step_id,
            "output_tokens": ledger.tokens,
            "ended_length": ledger.ended[FinishReason.LENGTH],
            "ended_abort": ledger.ended[FinishReason.ABORT],
            "prefix_hit_rate": stats.prefix_hits / max(stats.prefix_queries, 1),
            "evicted_pages": evicted,
            "num_preemptions": stats.num_preemptions,
            "rss_mb_warm": warm.resident_bytes / 1e6,
            "rss_mb_end": last.resident_bytes / 1e6,
            "rss_mb_most": peak / 1e6,
            "blocks_warm": warm.blocks,
            "blocks_end": last.blocks,
        },
    )
    figures = report.figures
    report.row("requests", f"{seconds:.1f} s", f"{figures['requests_per_s']:.0f} a second",
               f"{figures['cpu_us_per_request']:.1f} us of processor each")  # fmt: skip
    report.row("ended", f"{figures['ended_length']} whole", f"{figures['ended_abort']} aborted", "each once")
    report.row("steps", str(stats.step_id), f"{ledger.tokens} output tokens")
    report.row("prefix cache", f"{100 * float(figures['prefix_hit_rate']):.1f} % hit")
    report.row("pages", f"{stats.pages_total}", f"{evicted} evictions", f"{stats.num_preemptions} preemptions")
    report.row("pages lost", "0")
    tenth = f"after {100 // ROUNDS} %"
    report.row(
        "memory at rest, MB",
        f"{figures['rss_mb_warm']:.1f} {tenth}",
        f"{figures['rss_mb_end']:.1f} at the end",
        f"{figures['rss_mb_most']:.1f} at most",
    )
    report.row("Python's memory blocks", f"{warm.blocks} {tenth}", f"{last.blocks} at the end")
    return report


def _sizes(config: EngineConfig, options: SoakOptions) -> NullSizes:
    each = -(-_PAGES_EACH * 16 // config.block_size) * options.kv_tables
    longest = LONGEST_PROMPT + LONGEST_OUTPUT
    # One request of the greatest length fits; of a sliding group it holds no more than its window.
    least = options.kv_tables * (-(-max(longest, SLIDING_WINDOW) // config.block_size) + 2)
    return NullSizes(
        max_num_seqs=options.running,
        max_num_batched_tokens=max(config.max_num_batched_tokens or 2048, options.running * (1 + 2 * options.drafts)),
        max_model_len=longest,
        kv_tables=options.kv_tables,
        drafts=options.drafts,
        num_kv_pages=1 + max(options.running * each, least),
    )


def _run(core: EngineCore, source: RequestSource, ledger: Ledger, count: int, at_once: int) -> int:
    """Serve `count` requests to their ends, at most `at_once` unfinished at a time; the most memory that was taken."""
    drawn: list[Ask] = []
    aborts: dict[int, list[str]] = {}
    step, most = 0, 0
    while count or drawn or ledger.open:
        while (count or drawn) and len(ledger.open) < at_once:
            if not drawn:
                drawn = source.draw(min(count, _DRAWN_AT_ONCE))[::-1]
                count -= len(drawn)
                most = max(most, resident_bytes())
            ask = drawn.pop()
            ledger.begin(ask)
            core.add_request(ask.request)
            if ask.abort_after is not None:
                aborts.setdefault(step + ask.abort_after, []).append(ask.request.request_id)
        if step in aborts and (ids := ledger.abort(aborts.pop(step))):
            core.abort(ids)
        ledger.take(core.step().outputs)
        step += 1
    while core.has_work():
        ledger.take(core.step().outputs)
    return most
