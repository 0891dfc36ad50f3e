"""Clients that do not read, that come in crowds and leave at once: memory and time are bounded, and others get what a
quiet server gives."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from ..serving.conftest import Server

WRITE_TIMEOUT = 2


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    running = Server(
        "tiny", "--dtype", "float64", "--max-num-seqs", "16", "--write-timeout", str(WRITE_TIMEOUT),
        "--max-connections", "1200", "--num-kv-pages", "1000",
    )  # fmt: skip
    yield running
    assert running.stop() == 0, "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


def request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + b"\r\n" + data


def answer(server: Server) -> str:
    body = {"prompt": "Quiet", "max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    reply = httpx.post(server.address + "/v1/completions", json=body, timeout=120).raise_for_status()
    return reply.json()["choices"][0]["text"]


def idle(metrics: dict[str, float]) -> bool:
    return not any(metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used"))


def connect(server: Server, buffer: int | None = None) -> socket.socket:
    """buffer: of what it has not read; the server's system then keeps little for it too, as it does for segments that
    are short, where it would keep megabytes for those of a machine's own network."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    return connection


def test_clients_that_never_read(tight: Server) -> None:
    """Each would be sent far more than the system buffers. They are cut off; the server's memory stays."""
    expected = answer(tight)
    server = psutil.Process(tight.process.pid)
    before = server.memory_info().rss
    body = {"prompt": "Loud", "max_tokens": 120, "n": 2, "logprobs": 64, "stream": True, "ignore_eos": True}
    silent = [connect(tight, 4096) for _ in range(2)]
    try:
        for connection in silent:
            connection.sendall(request(body))
        tight.until(lambda m: m["num_requests_running"] > 0, "they run")
        assert answer(tight) == expected
        most, deadline = 0, time.monotonic() + 90
        while any(c.raddr for c in server.net_connections("tcp") if c.raddr and c.raddr.port in ports(silent)):
            most = max(most, server.memory_info().rss)
            assert time.monotonic() < deadline, "clients that do not read are kept for ever"
            time.sleep(0.1)
        tight.until(idle, "the engine is idle", 90)
        assert most - before < 200 * 2**20, f"the server grew by {(most - before) / 2**20:.0f} MiB"
        assert answer(tight) == expected
    finally:
        for connection in silent:
            connection.close()


def ports(connections: list[socket.socket]) -> set[int]:
    return {connection.getsockname()[1] for connection in connections}


def test_an_answer_that_nobody_fetches(tight: Server) -> None:
    """It is complete, and the connection would be closed, once it is read."""
    body = {"prompt": "Loud", "max_tokens": 60, "n": 4, "logprobs": 64, "ignore_eos": True, "temperature": 1}
    with connect(tight, 4096) as connection:
        connection.sendall(request(body))
        tight.until(lambda m: m["num_requests_running"] > 0, "it runs", 60)
        tight.until(idle, "the engine is idle", 90)
        deadline = time.monotonic() + 30
        server = psutil.Process(tight.process.pid)
        while any(c.raddr and c.raddr.port in ports([connection]) for c in server.net_connections("tcp")):
            assert time.monotonic() < deadline, "the connection stays for ever"
            time.sleep(0.1)


def test_a_slow_reader_gets_everything(tight: Server) -> None:
    """Slower than the time that a stalled client has, but it reads."""
    body = {"prompt": "Loud", "max_tokens": 100, "n": 4, "logprobs": 64, "stream": True, "ignore_eos": True}
    with connect(tight, 65536) as connection:
        connection.sendall(request(body).replace(b"Host: x", b"Host: x\r\nConnection: close"))
        seen, began = b"", time.monotonic()
        while chunk := connection.recv(2**15):
            seen += chunk
            if time.monotonic() - began < 1.6 * WRITE_TIMEOUT:
                time.sleep(0.2)
    assert seen.endswith(b"0\r\n\r\n") and b"data: [DONE]" in seen
    assert seen.count(b'"finish_reason":"length"') == 4


def test_a_thousand_clients_that_leave_at_once(tight: Server) -> None:
    expected = answer(tight)
    clients = [connect(tight) for _ in range(1000)]
    for i, connection in enumerate(clients):
        body = {"prompt": f"Crowd {i}", "max_tokens": 1500, "stream": i % 2 == 0, "ignore_eos": True}
        connection.sendall(request(body))
    running = "num_requests_running"
    tight.until(lambda m: m[running] + m["num_requests_waiting"] >= 1000, "all have come", 60)
    began = time.monotonic()
    for connection in clients:
        connection.close()
    tight.until(idle, "the engine is idle", 90)
    assert time.monotonic() - began < 20
    assert answer(tight) == expected
    assert psutil.Process(tight.process.pid).num_fds() < 100


def test_too_many_connections(tight: Server) -> None:
    """Idle ones are refused beyond the limit, at once, and go away by themselves; then there is room again."""
    clients = [connect(tight) for _ in range(1250)]
    try:
        last = clients[-1]
        assert last.recv(100).startswith(b"HTTP/1.1 503")
        clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for connection in clients:
            connection.close()
    deadline = time.monotonic() + 20
    while psutil.Process(tight.process.pid).num_fds() > 100:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer(tight)
