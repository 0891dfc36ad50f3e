"""The load generator against small servers: it does not wait, and it counts what fails."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest

from engine.types.errors import ConfigError
from engine_bench.exchange import Target, read_outcome
from engine_bench.load import run_load
from engine_bench.serve import Load, ServeOptions, make_report, parse_target
from engine_bench.workload import Ask, Lengths

STREAM = (
    b"HTTP/1.1 200 OK\r\n\r\n"
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n'
    b"data: [DONE]\n\n"
)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}"
CUT = STREAM.partition(b'data: {"choices": [],')[0]


def target_of(server: asyncio.Server) -> Target:
    return Target("127.0.0.1", server.sockets[0].getsockname()[1], False, "", None)


async def test_arrivals_do_not_wait_for_answers():
    """The server answers nobody until all have come: a closed loop would never end."""
    everybody = asyncio.Barrier(20)

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await everybody.wait()
        writer.write(STREAM)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        target = target_of(server)
        requests = [target.encode("GET", "/")] * 20
        exchanges = await run_load(target, requests, [0.002 * i for i in range(20)], timeout=30)
    outcomes = [read_outcome(exchange) for exchange in exchanges]
    assert [outcome.error for outcome in outcomes] == [""] * 20
    assert all(exchange.sent >= exchange.planned for exchange in exchanges)
    # Latency counts from the planned arrival, so it holds the wait for the last one.
    assert outcomes[0].times[0] >= 0.002 * 19


async def test_errors_are_counted_by_what_they_are():
    answers = [STREAM, BUSY, CUT, None, b"", BUSY]

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        answer = answers[int(head.split(b" ")[1].strip(b"/"))]
        if answer is None:
            await reader.read()  # until the client gives up
        else:
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        target = target_of(server)
        requests = [target.encode("GET", f"/{i}") for i in range(len(answers))]
        exchanges = await run_load(target, requests, [0.0] * len(answers), timeout=2)
    load = Load(exchanges, [read_outcome(exchange) for exchange in exchanges])
    report = make_report(load, [Ask([1, 2], 1 + i) for i in range(len(answers))], options(), "here")
    figures = report.figures
    assert (figures["completed"], figures["errors"], figures["num_requests"]) == (1, 5, 6)
    by_word = {name: count for name, count in figures.items() if name.startswith("errors_")}
    assert by_word == {"errors_http_503": 2, "errors_closed": 2, "errors_timeout": 1}
    assert (figures["input_tokens"], figures["output_tokens"], figures["good_requests"]) == (2, 1, 1)
    assert figures["output_tokens_asked"] == 1, "those that came to nothing do not count"
    assert Counter(line.split()[0] for line in report.lines if line)["failed"] == 3


async def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        target = Target("127.0.0.1", unused.getsockname()[1], False, "", None)
        exchanges = await run_load(target, [target.encode("GET", "/")] * 3, [0.0] * 3, timeout=5)
    assert [read_outcome(exchange).error for exchange in exchanges] == ["refused"] * 3


def options() -> ServeOptions:
    return ServeOptions(
        url=None, rate=1.0, burstiness=1.0, num_requests=6, inputs=Lengths(2, 2), outputs=Lengths(1, 1),
        slo_ttft=1.0, slo_itl=None, timeout=2.0, api_key=None, model=None, plot=None, seed=0,
    )  # fmt: skip


def test_addresses():
    assert parse_target("http://localhost:8000/v1/", "k") == Target("localhost", 8000, False, "", "k")
    assert parse_target("https://[::1]/base", None) == Target("::1", 443, True, "/base", None)
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError, match="--url"):
            parse_target(url, None)
