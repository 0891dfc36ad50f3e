"""`engine bench serve` with conversations: each turn is sent when the answer to the one before is complete, and the
user has thought. The next prompt begins with all that was said, which the prefix cache may find."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.types.errors import EngineError
from engine_bench.conversations import Conversation, draw_conversations, read_conversations
from engine_bench.exchange import Exchange, Outcome, Target, read_outcome, read_text, send
from engine_bench.load import LEAD_SECONDS
from engine_bench.plot import check_plot, draw_plot
from engine_bench.report import Figure, Report
from engine_bench.serve import QUANTILES, ServeOptions, finishes, gaps, parse_target, served_model
from engine_bench.server_process import own_server
from engine_bench.statistics import is_good, percentile, summary
from engine_bench.workload import Lengths, draw_arrivals

MOST_TURNS = 16
"""How many turns have a line of their own."""
_HITS = re.compile(r"^\w*[:_]?prefix_cache_(hits|queries)(?:_total)?(?:\{[^}]*\})? ([\d.eE+]+)$", re.MULTILINE)
_METRICS_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to replay, beside `ServeOptions`, whose requests are conversations here.

    Args:
        file: of conversations; None: they are drawn.
        turns: of each that is drawn.
        system_prompts, system_words: see `draw_conversations`.
        think_time: mean seconds between an answer and the next turn, drawn from an exponential distribution; 0: none.
            A file's own times go before it.
        max_concurrency: most conversations at once; None: no limit.
    """

    file: str | None
    turns: Lengths
    system_prompts: int
    system_words: int
    think_time: float
    max_concurrency: int | None


class Turn(NamedTuple):
    """One turn that was sent.

    Args:
        number: from 1.
        output_len: tokens that it asked for.
        exchange, outcome: what came of it.
    """

    number: int
    output_len: int
    exchange: Exchange
    outcome: Outcome

    @property
    def time_per_token(self) -> list[float]:
        """Seconds per output token behind the first; [] where there is one."""
        times, tokens = self.outcome.times, self.outcome.output_tokens
        return [(times[-1] - times[0]) / (tokens - 1)] if tokens > 1 else []


def measure_replay(options: ServeOptions, replay: ReplayOptions, server_flags: Sequence[str]) -> Report:
    """Run it, against `options.url` or a server of our own with `server_flags`.

    Raises:
        ConfigError: the file has no conversations, an option makes no sense, or matplotlib is missing for --plot.
        EngineError: no server answers.
    """
    if options.plot is not None:
        check_plot(options.plot)
    if replay.file is not None:
        conversations = read_conversations(replay.file, options.num_requests)
    else:
        conversations = draw_conversations(
            options.num_requests, replay.turns, options.inputs, replay.system_prompts, replay.system_words, options.seed
        )
    if options.url is not None:
        return _measure(options, replay, conversations, parse_target(options.url, options.api_key))
    with own_server(server_flags) as server:
        return _measure(options, replay, conversations, parse_target(server.url, options.api_key))


def _measure(options: ServeOptions, replay: ReplayOptions, conversations: list[Conversation], target: Target) -> Report:
    model = options.model or asyncio.run(served_model(target))
    before = asyncio.run(_prefix_counts(target))
    turns = asyncio.run(_run(options, replay, conversations, target, model))
    after = asyncio.run(_prefix_counts(target))
    report = make_report(turns, conversations, options, f"{target.host}:{target.port} ({model})")
    report.figures["model"] = model
    looked_up = after["queries"] - before["queries"]
    if looked_up > 0:
        share = (after["hits"] - before["hits"]) / looked_up
        report.figures["prefix_hit_share"] = share
        report.row("prefix cache", f"{share:.1%} of prompt tokens found", "(the server's metrics)")
    if options.plot is not None:
        draw_plot(options.plot, report.title, _distributions([turn for turn in turns if not turn.outcome.error]))
        report.row("drawn to", options.plot)
    return report


async def _run(
    options: ServeOptions, replay: ReplayOptions, conversations: list[Conversation], target: Target, model: str
) -> list[Turn]:
    """All turns, as they ended."""
    warmup = Exchange(planned=time.perf_counter())
    await send(target, _encode(target, model, [{"role": "user", "content": "Hello"}], 4), warmup, options.timeout)
    if error := read_outcome(warmup).error:
        found = f"{error}: {warmup.pieces[-1][1].decode(errors='replace')[-400:]}" if warmup.pieces else error
        raise EngineError("send a first request to the server", found, "see the server's log")
    random = np.random.default_rng([options.seed, 1])
    lengths = [
        random.integers(options.outputs.low, options.outputs.high, len(one.turns), endpoint=True).tolist()
        for one in conversations
    ]
    thinks = [
        one.think_times or random.exponential(replay.think_time, len(one.turns) - 1).tolist() for one in conversations
    ]
    arrivals = draw_arrivals(len(conversations), options.rate, options.burstiness, options.seed)
    places = nullcontext() if replay.max_concurrency is None else asyncio.Semaphore(replay.max_concurrency)
    turns: list[Turn] = []
    start = time.perf_counter() + LEAD_SECONDS

    async def converse(place: int) -> None:
        conversation, planned = conversations[place], start + arrivals[place]
        await _until(planned)
        async with places:
            planned = max(planned, time.perf_counter()) if replay.max_concurrency else planned
            messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
            for number, (said, length) in enumerate(zip(conversation.turns, lengths[place], strict=True), 1):
                messages.append({"role": "user", "content": said})
                exchange = Exchange(planned=planned)
                await _until(planned)
                await send(target, _encode(target, model, messages, length), exchange, options.timeout)
                turns.append(Turn(number, length, exchange, read_outcome(exchange)))
                if turns[-1].outcome.error or number == len(conversation.turns):
                    return  # without its answer there is no next turn
                messages.append({"role": "assistant", "content": read_text(exchange)})
                planned = exchange.pieces[-1][0] + thinks[place][number - 1]

    async with asyncio.TaskGroup() as tasks:
        for place in range(len(conversations)):
            tasks.create_task(converse(place))
    return turns


async def _until(when: float) -> None:
    if (delay := when - time.perf_counter()) > 0:
        await asyncio.sleep(delay)


def _encode(target: Target, model: str, messages: list[dict[str, str]], length: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": length,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return target.encode("POST", "/v1/chat/completions", body)


async def _prefix_counts(target: Target) -> Counter[str]:
    """Prompt tokens that the server looked up in its prefix cache, and found, by its metrics; {} where it has none."""
    exchange = Exchange(planned=time.perf_counter())
    await send(target, target.encode("GET", "/metrics"), exchange, _METRICS_SECONDS)
    text = b"".join(piece for _, piece in exchange.pieces).decode(errors="replace")
    counts: Counter[str] = Counter()
    for name, value in _HITS.findall(text.replace("\r", "")):
        counts[name] += float(value)  # type: ignore[assignment]
    return counts


def make_report(
    turns: Sequence[Turn], conversations: Sequence[Conversation], options: ServeOptions, where: str
) -> Report:
    """All figures of a replay, and their table."""
    done = [turn for turn in turns if not turn.outcome.error]
    outcomes = [turn.outcome for turn in done]
    first = min(turn.exchange.planned for turn in turns)
    seconds = max(turn.exchange.planned - first + (turn.outcome.times or [0.0])[-1] for turn in turns)
    good = sum(is_good(o.times[0], gaps(o), options.slo_ttft, options.slo_itl) for o in outcomes)
    errors = Counter(turn.outcome.error for turn in turns if turn.outcome.error)
    asked = sum(len(one.turns) for one in conversations)
    tokens_out = sum(outcome.output_tokens for outcome in outcomes)
    figures: dict[str, Figure] = {
        "bench": "serve",
        "load": "conversations",
        "rate": options.rate if options.rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "conversations": len(conversations),
        "turns": asked,
        "completed": len(done),
        "not_sent": asked - len(turns),
        "seconds": seconds,
        "input_tokens": sum(outcome.input_tokens for outcome in outcomes),
        "output_tokens": tokens_out,
        "output_tokens_asked": sum(turn.output_len for turn in done),
        **finishes(outcomes),
        "requests_per_s": len(done) / seconds if seconds else 0.0,
        "output_tokens_per_s": tokens_out / seconds if seconds else 0.0,
        **_times("", done),
        "good_requests": good,
        "goodput_per_s": good / seconds if seconds else 0.0,
        "sent_late_ms_p99": percentile([(turn.exchange.sent - turn.exchange.planned) * 1e3 for turn in turns], 99),
        "errors": errors.total(),
        **{f"errors_{word}": count for word, count in sorted(errors.items())},
    }
    report = Report(
        f"conversations with {where}: {len(conversations)} of {asked} turns in all, {options.rate:g} begun a second, "
        f"{options.outputs} tokens an answer",
        figures,
    )
    report.row("completed", f"{len(done)} of {asked} turns", f"{seconds:.2f} s")
    report.row("output tokens", f"{figures['output_tokens_per_s']:.1f} a second")
    report.quantiles("time to first token, ms", "ttft_ms", QUANTILES)
    report.quantiles("time per token, ms", "tpot_ms", QUANTILES)
    report.quantiles("time between tokens, ms", "itl_ms", QUANTILES)
    report.quantiles("whole turn, ms", "e2e_ms", QUANTILES)
    if options.slo_ttft is not None or options.slo_itl is not None:
        report.row("goodput", f"{figures['goodput_per_s']:.2f} turns a second")
    for word, count in sorted(errors.items()):
        report.row("failed", f"{count} {word}")
    _add_turns(report, done)
    return report


def _times(prefix: str, done: Sequence[Turn]) -> dict[str, float]:
    """Percentiles of the turns that completed, and the share of their prompts' tokens that was found in the cache."""
    outcomes = [turn.outcome for turn in done]
    figures = {
        **summary(f"{prefix}ttft_ms", [o.times[0] for o in outcomes], QUANTILES, 1e3),
        **summary(f"{prefix}tpot_ms", [value for turn in done for value in turn.time_per_token], QUANTILES, 1e3),
        **summary(f"{prefix}itl_ms", [gap for o in outcomes for gap in gaps(o)], QUANTILES, 1e3),
        **summary(f"{prefix}e2e_ms", [o.times[-1] for o in outcomes], QUANTILES, 1e3),
    }
    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None]
    if tokens := sum(outcome.input_tokens for outcome in told):
        figures[f"{prefix}cached_share"] = sum(outcome.cached_tokens or 0 for outcome in told) / tokens
    return figures


def _add_turns(report: Report, done: Sequence[Turn]) -> None:
    """A line for each turn by its number; those behind the last have one together."""
    groups: dict[int, list[Turn]] = {}
    for turn in done:
        groups.setdefault(min(turn.number, MOST_TURNS + 1), []).append(turn)
    report.lines += ["", f"  {'turn':<12}" + "".join(f"{name:>16}" for name in _COLUMNS)]
    for number, turns in sorted(groups.items()):
        name = f"turn_{number}_" if number <= MOST_TURNS else "turn_later_"
        found = {f"{name}completed": len(turns), **_times(name, turns)}
        found[f"{name}input_tokens"] = sum(turn.outcome.input_tokens for turn in turns) / len(turns)
        report.figures |= found
        cells = [found.get(name + figure) for figure in _COLUMNS.values()]
        shown = [
            "-" if cell is None else f"{cell:.0%}" if figure == "cached_share" else f"{cell:.4g}"
            for cell, figure in zip(cells, _COLUMNS.values(), strict=True)
        ]
        label = str(number) if number <= MOST_TURNS else f"{number} and later"
        report.lines.append(f"  {label:<12}" + "".join(f"{cell:>16}" for cell in shown))


_COLUMNS = {
    "turns": "completed",
    "tokens in, mean": "input_tokens",
    "cached": "cached_share",
    "TTFT p50, ms": "ttft_ms_p50",
    "TTFT p90, ms": "ttft_ms_p90",
    "TPOT p50, ms": "tpot_ms_p50",
    "ITL p99, ms": "itl_ms_p99",
    "whole p50, ms": "e2e_ms_p50",
}


def _distributions(done: Sequence[Turn]) -> dict[str, list[float]]:
    """Milliseconds, by what they are."""
    return {
        "time to first token, ms": [turn.outcome.times[0] * 1e3 for turn in done],
        "time between tokens, ms": [gap * 1e3 for turn in done for gap in gaps(turn.outcome)],
        "whole turn, ms": [turn.outcome.times[-1] * 1e3 for turn in done],
    }
