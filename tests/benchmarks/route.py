"""`python -m tests.benchmarks.route [REQUESTS]`: what `engine route` adds to a request.

One request after the other, to a server whose worker computes nothing and to a router before it, in turns over open
connections: the difference is what a client waits longer. Beside it the processor time of the router's process.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from urllib.parse import urlsplit

import psutil

from engine_bench.report import Report
from engine_bench.server_process import own_server
from engine_bench.statistics import summary

QUANTILES = (10, 50, 90)
_SERVER = "tests.benchmarks.instant_server"
_BODY = json.dumps(
    {"prompt": "Tell me about the sea.", "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
).encode()
_WARM_UP = 50


def measure_route(requests: int) -> Report:
    """Run it. Raises EngineError where one of the two does not start."""
    with (
        own_server(["--num-kv-pages", "64"], (_SERVER, "0")) as server,
        own_server(["--backend", server.url], command="route") as router,
    ):
        ways = {"direct": _connection(server.url), "routed": _connection(router.url)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_WARM_UP):
            for connection in ways.values():
                _ask(connection)
        before = sum(psutil.Process(router.pid).cpu_times()[:2])
        for _ in range(requests):
            for name, connection in ways.items():
                seconds[name].append(_ask(connection))
        spent = sum(psutil.Process(router.pid).cpu_times()[:2]) - before
    report = Report(f"engine route: {requests} requests, one after the other", {"bench": "route", "requests": requests})
    for name, values in seconds.items():
        report.figures |= summary(f"{name}_ms", values, QUANTILES, 1e3)
        report.quantiles(f"{name}, ms", f"{name}_ms", QUANTILES)
    added = [1e3 * (b - a) for a, b in zip(seconds["direct"], seconds["routed"], strict=True)]
    report.figures |= summary("added_ms", added, QUANTILES) | {"router_cpu_ms": 1e3 * spent / requests}
    report.quantiles("added, ms", "added_ms", QUANTILES)
    report.row("router's processor time", f"{1e3 * spent / requests:.2f} ms a request")
    return report


def _connection(url: str) -> http.client.HTTPConnection:
    where = urlsplit(url)
    assert where.hostname is not None
    return http.client.HTTPConnection(where.hostname, where.port, timeout=60)


def _ask(connection: http.client.HTTPConnection) -> float:
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", _BODY, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return time.perf_counter() - began


if __name__ == "__main__":
    measure_route(int(sys.argv[1]) if len(sys.argv) > 1 else 1000).write(sys.stdout, as_json=False)
