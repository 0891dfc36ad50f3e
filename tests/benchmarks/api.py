"""`python -m tests.benchmarks api`: what the API server costs, where the engine's tokens are there at once.

A server as `engine serve` starts it, its engine core in a process behind ZeroMQ, with a worker that computes nothing:
what is measured is the way of a token from the core to the client, and that of a request back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from msgspec.structs import replace

from engine.frontend.assemble import assemble_frontend
from engine.frontend.launch import CORE_WORKER, launch
from engine.loop.assemble import assemble_core
from engine.types.errors import ConfigError, EngineError
from engine.types.params import SamplingParams
from engine_bench.report import Figure, Report
from engine_bench.server_process import RunningServer, own_server
from engine_bench.statistics import percentile, summary
from engine_kit.process_client import MODULE as CORE_MODULE
from tests.benchmarks.instant_worker import worker_class
from tests.benchmarks.stream_load import Read, Reader, Streams

if TYPE_CHECKING:
    from engine.embedding import EngineConfig

QUANTILES = (50, 90, 99)
ROUTES = ("chat", "completions")
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_SERVER = "tests.benchmarks.instant_server"
_WORDS = "Tell me about the sea, the wind and the ships that go there, and say what day it is. "
_PROMPT_TOKENS = 128
"""More than a prompt has, its template included."""


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """What to measure.

    Args:
        connections: streams at once.
        output_len: tokens of each.
        clients: processes that read them.
        repeats: of each load.
        rate: tokens a second, of all streams together, of the first load; the second has as many as there can be.
        requests: one after the other, for the time to first token.
        route: "chat" or "completions".
    """

    connections: int
    output_len: int
    clients: int
    repeats: int
    rate: float
    requests: int
    route: str


@dataclass(frozen=True)
class _Run:
    """One load: what the clients read, and the processor seconds of the server's processes and of the cores."""

    reads: list[Read]
    server: float
    core: float

    @property
    def seconds(self) -> float:
        return max(read.ended for read in self.reads) - min(read.began for read in self.reads)

    @property
    def tokens(self) -> int:
        return sum(read.tokens for read in self.reads)

    @property
    def events(self) -> int:
        return sum(read.events for read in self.reads)


def measure_api(config: EngineConfig, options: ApiOptions, flags: Sequence[str]) -> Report:
    """Run it, with a server of our own with `flags`.

    Raises:
        ConfigError: the flags ask for another platform, whose worker would compute.
        EngineError: the server ended, or a stream did not come whole.
    """
    config, given = _instant(config, options, flags)
    alone = _first_tokens_of_core(config, options.requests)
    loads: dict[float, list[_Run]] = {}
    for rate in dict.fromkeys((options.rate, 0.0)):
        with own_server(given, (_SERVER, f"{rate:g}")) as server:
            _load(server, options, 1, 8)  # everything is imported, every buffer has its size
            loads[rate] = [_load(server, options, 1, options.output_len) for _ in range(options.repeats)]
            # The second counts: of a server that has served, and now has little to do.
            for _ in range(0 if rate else 2):
                lone = _load(server, options, options.requests, 8, connections=1).reads[0].first_token
    return _report(options, loads, lone, alone)


def _instant(config: EngineConfig, options: ApiOptions, flags: Sequence[str]) -> tuple[EngineConfig, list[str]]:
    """The settings of an engine whose worker computes nothing."""
    blocks = -(-(options.output_len + _PROMPT_TOKENS) // config.block_size)
    own: dict[str, int] = {}
    if "max_num_seqs" not in config.model_fields_set:
        own["max_num_seqs"] = options.connections
    if config.num_kv_pages is None:
        own["num_kv_pages"] = 2 + options.connections * blocks
    extra = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    return config.model_copy(update=own), [*flags, *extra]


def _first_tokens_of_core(config: EngineConfig, count: int) -> list[float]:
    """Seconds from a request to its first token in an engine core by itself."""
    plan = launch(config)
    if plan.start.worker_class != CORE_WORKER:
        raise ConfigError(
            "measure without a model",
            f"the platform brings a worker of its own, {plan.start.worker_class}, which would compute",
            "choose another --platform",
        )
    inputs = assemble_frontend(plan).inputs
    core = assemble_core(replace(plan.start, worker_class=worker_class()))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    seconds = []
    try:
        for index in range(count + 10):
            processed = inputs.process(str(index), _WORDS, params)
            began = time.perf_counter()
            core.add_request(processed.requests[0])
            while not core.step().outputs:
                pass
            seconds.append(time.perf_counter() - began)
            while core.has_work():
                core.step()
    finally:
        core.shutdown()
    return seconds[10:]


def _load(
    server: RunningServer, options: ApiOptions, rounds: int, output_len: int, connections: int | None = None
) -> _Run:
    """Streams of `output_len` tokens on every connection, `rounds` after each other."""
    where = urlsplit(server.url)
    assert where.hostname is not None and where.port is not None
    count = connections or options.connections
    clients = min(options.clients, count)
    readers: list[Reader] = []
    with contextlib.ExitStack() as stack:
        for client in range(clients):
            bodies = [_body(options.route, index, output_len) for index in range(client, count, clients)]
            work = Streams(where.hostname, where.port, _PATHS[options.route], bodies, rounds)
            readers.append(Reader(work))
            stack.callback(readers[-1].stop)
        for reader in readers:
            reader.wait_connected()
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        cores = [CORE_MODULE in process.cmdline() for process in processes]
        before = [_processor(process) for process in processes]
        for reader in readers:
            reader.go()
        reads = [reader.result() for reader in readers]
        after = [_processor(process) for process in processes]
    if errors := [error for read in reads for error in read.errors]:
        raise EngineError("read the server's streams", f"{len(errors)} did not come whole: {errors[0]}")
    if (tokens := sum(read.tokens for read in reads)) != count * rounds * output_len:
        raise EngineError("read the server's streams", f"{tokens} tokens, not {count * rounds * output_len}")
    spent = [b - a for a, b in zip(before, after, strict=True)]
    of_cores = sum(seconds for seconds, core in zip(spent, cores, strict=True) if core)
    return _Run(reads, sum(spent) - of_cores, of_cores)


def _body(route: str, index: int, output_len: int) -> dict[str, Any]:
    said = f"{index}. {_WORDS}"
    asked = {"messages": [{"role": "user", "content": said}]} if route == "chat" else {"prompt": said}
    return {
        **asked,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _processor(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _report(options: ApiOptions, loads: dict[float, list[_Run]], lone: list[float], alone: list[float]) -> Report:
    added = {q: (percentile(lone, q) - percentile(alone, q)) * 1e3 for q in QUANTILES}
    figures: dict[str, Figure] = {
        "bench": "api",
        "route": options.route,
        "connections": options.connections,
        "output_len": options.output_len,
        "rate": options.rate,
        **summary("ttft_ms", lone, QUANTILES, 1e3),
        **summary("core_ttft_ms", alone, QUANTILES, 1e3),
        **{f"added_ttft_ms_p{q}": value for q, value in added.items()},
    }
    report = Report(
        f"the API server with tokens that are there at once: {options.connections} streams of {options.output_len} "
        f"tokens at once ({options.route}), read by {options.clients} processes; {options.repeats} loads of each kind, "
        "of which the median is told, and one request after the other",
        figures,
    )
    for rate, runs in loads.items():
        name = f"at {rate:,.0f} tokens a second" if rate else "as fast as it goes"
        _add_load(report, "paced" if rate else "free", name, runs)
    report.row("one request at a time")
    report.quantiles("  first token, ms", "ttft_ms", QUANTILES)
    report.quantiles("  in the core alone", "core_ttft_ms", QUANTILES)
    report.quantiles("  added by the server", "added_ttft_ms", QUANTILES)
    return report


def _add_load(report: Report, prefix: str, name: str, runs: list[_Run]) -> None:
    run = sorted(runs, key=lambda run: run.tokens / run.seconds)[(len(runs) - 1) // 2]
    tokens, seconds = run.tokens, run.seconds
    cores = {
        "server": run.server / seconds,
        "core": run.core / seconds,
        "client": sum(read.processor for read in run.reads) / seconds,
    }
    report.figures |= {
        f"{prefix}_tokens_per_s": tokens / seconds,
        f"{prefix}_events_per_s": run.events / seconds,
        f"{prefix}_events_per_token": run.events / tokens,
        **{f"{prefix}_{who}_cores": value for who, value in cores.items()},
    }
    report.row(name)
    report.row("  tokens a second", f"{tokens / seconds:,.0f}")
    report.row("  events a second", f"{run.events / seconds:,.0f}", f"{run.events / tokens:.3f} a token")
    report.row("  cores used", *(f"{who} {value:.2f}" for who, value in cores.items()))
    per = ", ".join(f"{who} {value / tokens * seconds * 1e6:.1f}" for who, value in cores.items() if who != "client")
    report.row("  processor, us a token", per)
