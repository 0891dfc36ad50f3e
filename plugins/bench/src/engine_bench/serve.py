"""`engine bench serve`: open-loop load on a server, ours or any with OpenAI's completions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from engine.types.errors import ConfigError, EngineError
from engine_bench.exchange import Exchange, Outcome, Target, read_json, read_outcome, send
from engine_bench.load import run_load
from engine_bench.plot import check_plot, draw_plot
from engine_bench.report import Figure, Report, histogram
from engine_bench.server_process import own_server
from engine_bench.statistics import is_good, percentile, summary
from engine_bench.workload import Ask, Lengths, draw_arrivals, draw_asks

QUANTILES = (50, 90, 99)
TOKEN_IDS = (10, 250)
"""Prompts are made of these ids, which every vocabulary has: the server does not tell its vocabulary."""
LATE_MS = 10.0
"""Where requests were sent later than this after their time, the load was not what was asked."""
_READY_SECONDS = 60.0
_WARMUP = Ask([11, 12, 13, 14], 4)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What to measure.

    Args:
        url: base address of a running server, without /v1; None starts one.
        rate: requests per second; infinity sends all at once.
        burstiness: see `engine_bench.workload.draw_arrivals`.
        slo_ttft, slo_itl: objectives in seconds; None sets none.
        timeout: seconds that each request gets.
        model: the name to ask for; None asks the server what it serves.
        plot: a file for the distributions; None draws none.
    """

    url: str | None
    rate: float
    burstiness: float
    num_requests: int
    inputs: Lengths
    outputs: Lengths
    slo_ttft: float | None
    slo_itl: float | None
    timeout: float
    api_key: str | None
    model: str | None
    plot: str | None
    seed: int


@dataclass(frozen=True)
class Load:
    """What came of the load: when each request was to arrive, when it was sent, and how it ended."""

    exchanges: list[Exchange]
    outcomes: list[Outcome]

    @property
    def completed(self) -> list[Outcome]:
        """Those that ended without an error."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def seconds(self) -> float:
        """From the first planned arrival to the last event of any request (at least to the last planned arrival)."""
        first = self.exchanges[0].planned
        ends = [e.planned - first + (o.times[-1] if o.times else 0.0) for e, o in self._pairs()]
        return max(ends)

    def _pairs(self) -> list[tuple[Exchange, Outcome]]:
        return list(zip(self.exchanges, self.outcomes, strict=True))


def measure_serve(options: ServeOptions, server_flags: Sequence[str]) -> Report:
    """Run it, against `options.url` or a server of our own with `server_flags`.

    Raises:
        ConfigError: an option makes no sense, or matplotlib is missing for --plot.
        EngineError: no server answers.
    """
    if options.plot is not None:
        check_plot(options.plot)
    if options.url is not None:
        return _measure(options, parse_target(options.url, options.api_key))
    with own_server(server_flags) as server:
        return _measure(options, parse_target(server.url, options.api_key))


def parse_target(url: str, api_key: str | None) -> Target:
    """Take a base address apart. Raises ConfigError where it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}", str(error), "write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url {url}", "it is no http address", "write http://HOST:PORT")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host, port or (443 if tls else 80), tls, path, api_key)


def _measure(options: ServeOptions, target: Target) -> Report:
    model = options.model or asyncio.run(served_model(target))
    asks = draw_asks(options.num_requests, options.inputs, options.outputs, TOKEN_IDS, options.seed)
    arrivals = draw_arrivals(options.num_requests, options.rate, options.burstiness, options.seed)
    requests = [_encode(target, model, ask) for ask in asks]
    exchanges = asyncio.run(_run(target, _encode(target, model, _WARMUP), requests, arrivals, options.timeout))
    load = Load(exchanges, [read_outcome(exchange) for exchange in exchanges])
    report = make_report(load, asks, options, f"{target.host}:{target.port} ({model})")
    report.figures["model"] = model
    if options.plot is not None:
        draw_plot(options.plot, report.title, _distributions(load))
        report.row("drawn to", options.plot)
    return report


async def _run(
    target: Target, warmup: bytes, requests: list[bytes], arrivals: list[float], timeout: float
) -> list[Exchange]:
    exchange = Exchange(planned=time.perf_counter())
    await send(target, warmup, exchange, timeout)
    if error := read_outcome(exchange).error:
        found = f"{error}: {exchange.pieces[-1][1].decode(errors='replace')[-400:]}" if exchange.pieces else error
        raise EngineError("send a first request to the server", found, "see the server's log")
    return await run_load(target, requests, arrivals, timeout)


def _encode(target: Target, model: str, ask: Ask) -> bytes:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return target.encode("POST", "/v1/completions", body)


async def served_model(target: Target) -> str:
    """The first name that the server serves. Raises EngineError where it does not answer."""
    exchange = Exchange(planned=time.perf_counter())
    await send(target, target.encode("GET", "/v1/models"), exchange, _READY_SECONDS)
    asked = f"ask http{'s' * target.tls}://{target.host}:{target.port} what it serves"
    if not exchange.pieces:
        raise EngineError(asked, f"no answer ({exchange.fault or 'closed'})", "check --url, and that the server runs")
    try:
        return str(read_json(exchange)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(asked, f"its answer is no list of models: {error}", "name one with --model-name") from error


def _distributions(load: Load) -> dict[str, list[float]]:
    """Milliseconds of the completed requests, by what they are."""
    done = load.completed
    return {
        "time to first token, ms": [outcome.times[0] * 1e3 for outcome in done],
        "time between tokens, ms": [gap * 1e3 for outcome in done for gap in gaps(outcome)],
        "whole request, ms": [outcome.times[-1] * 1e3 for outcome in done],
    }


def gaps(outcome: Outcome) -> list[float]:
    """Seconds between the events that brought tokens."""
    return [after - before for before, after in pairwise(outcome.times)]


def finishes(done: Sequence[Outcome]) -> dict[str, Figure]:
    """How many answers ended for which reason, as figures."""
    counts = Counter(outcome.finish_reason for outcome in done if outcome.finish_reason)
    return {f"finished_{reason}": count for reason, count in sorted(counts.items())}


def make_report(load: Load, asks: Sequence[Ask], options: ServeOptions, where: str) -> Report:
    """All figures of a load, and their table."""
    done, seconds = load.completed, load.seconds
    tokens_in, tokens_out = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)
    good = sum(is_good(o.times[0], gaps(o), options.slo_ttft, options.slo_itl) for o in done)
    late = [(exchange.sent - exchange.planned) * 1e3 for exchange in load.exchanges]
    errors = Counter(outcome.error for outcome in load.outcomes if outcome.error)
    figures: dict[str, Figure] = {
        "bench": "serve",
        "rate": options.rate if options.rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "num_requests": len(load.outcomes),
        "completed": len(done),
        "seconds": seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "output_tokens_asked": sum(
            ask.output_len for ask, outcome in zip(asks, load.outcomes, strict=True) if not outcome.error
        ),
        **finishes(done),
        "requests_per_s": len(done) / seconds if seconds else 0.0,
        "output_tokens_per_s": tokens_out / seconds if seconds else 0.0,
        **summary("ttft_ms", [o.times[0] for o in done], QUANTILES, 1e3),
        **summary("itl_ms", [gap for o in done for gap in gaps(o)], QUANTILES, 1e3),
        **summary("e2e_ms", [o.times[-1] for o in done], QUANTILES, 1e3),
        "good_requests": good,
        "goodput_per_s": good / seconds if seconds else 0.0,
        "sent_late_ms_p99": percentile(late, 99),
        "errors": errors.total(),
        **{f"errors_{word}": count for word, count in sorted(errors.items())},
    }
    title = (
        f"serving at {where}: {len(load.outcomes)} requests, {options.rate:g} a second, burstiness "
        f"{options.burstiness:g}, {options.inputs} tokens in, {options.outputs} out"
    )
    report = Report(title, figures)
    _add_rows(report, load, options)
    if percentile(late, 99) > LATE_MS:
        report.warnings.append(
            f"1 % of the requests were sent more than {percentile(late, 99):.0f} ms late: the load generator could not "
            "keep up, or the machine is too busy; latencies count from the planned time"
        )
    return report


def _add_rows(report: Report, load: Load, options: ServeOptions) -> None:
    figures = report.figures
    report.row("completed", f"{figures['completed']} of {figures['num_requests']}", f"{figures['seconds']:.2f} s")
    report.row("requests", f"{figures['requests_per_s']:.2f} a second")
    report.row("output tokens", f"{figures['output_tokens_per_s']:.1f} a second")
    report.quantiles("time to first token, ms", "ttft_ms", QUANTILES)
    report.quantiles("time between tokens, ms", "itl_ms", QUANTILES)
    report.quantiles("whole request, ms", "e2e_ms", QUANTILES)
    if options.slo_ttft is not None or options.slo_itl is not None:
        limits = [
            f"{name} <= {limit * 1e3:g} ms"
            for name, limit in (("TTFT", options.slo_ttft), ("mean ITL", options.slo_itl))
            if limit is not None
        ]
        report.row("goodput", f"{figures['goodput_per_s']:.2f} a second", f"({', '.join(limits)})")
    for name, count in figures.items():
        if name.startswith("errors_"):
            report.row("failed", f"{count} {name.removeprefix('errors_')}")
    for label, values in _distributions(load).items():
        if values:
            report.lines += ["", f"  {label}", *histogram(values)]
