"""Several API processes in front of one engine: `engine serve --api-workers 2`, with the official client. They serve
HTTPS, which each has to do with the same certificate; the slow tests, and those of starts and ends, serve HTTP."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.serving.conftest import Certificate, Server

KEYS = """
- {key: free, name: free}
- {key: one, name: one, max_concurrent_requests: 1}
- {key: three, name: three, requests_per_minute: 3}
"""
LONG: dict[str, Any] = {"model": "tiny", "input": "Tell me a story.", "temperature": 1.9, "extra_body": {"seed": 1}}
"""Goes on and on."""
CHILD = "engine_server.processes.child"


def workers(server: Server) -> list[int]:
    """The API processes."""
    children = psutil.Process(server.process.pid).children()
    return sorted(child.pid for child in children if CHILD in child.cmdline())


class Connection:
    """A connection that stays open, so that one API process serves all that is sent over it."""

    def __init__(self, server: Server, key: str) -> None:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60)
        self.http = httpx.Client(base_url=server.address, limits=limits, timeout=60, verify=server.trust)
        self.http.headers["Authorization"] = f"Bearer {key}"
        self.http.get("/version").raise_for_status()
        pool = self.http._transport._pool  # type: ignore[attr-defined]
        stream = pool.connections[0]._connection._network_stream
        port = stream.get_extra_info("client_addr")[1]
        self.pid = next(pid for pid in workers(server) if port in _peers(pid))
        self.client = openai.OpenAI(
            base_url=server.address + "/v1", api_key=key, max_retries=0, timeout=60, http_client=self.http
        )

    def chat(self, tokens: int = 8, stream: bool = False, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Tell me of the sea."}],
            max_tokens=tokens,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
            **more,
        )


def _peers(pid: int) -> set[int]:
    return {found.raddr.port for found in psutil.Process(pid).net_connections("tcp") if found.raddr}


def both(server: Server, key: str = "free") -> list[Connection]:
    """A connection to each of the two API processes."""
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + 30
    spare = []
    while len(found) < 2:
        assert time.monotonic() < deadline, "every connection goes to one process"
        with contextlib.suppress(StopIteration, httpx.HTTPError):
            connection = Connection(server, key)
            spare.append(connection)
            found.setdefault(connection.pid, connection)
    for connection in spare:
        if connection not in found.values():
            connection.http.close()
    return [found[pid] for pid in sorted(found)]


def to(server: Server, key: str, pid: int) -> Connection:
    """A connection to this API process."""
    while (found := Connection(server, key)).pid != pid:
        found.http.close()
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(keys: Path, certificate: Certificate) -> Iterator[Server]:
    running = Server(
        *("tiny", "--dtype", "float64", "--max-num-seqs", "64", "--api-workers", "2", "--api-key-file", str(keys)),
        *("--shutdown-timeout", "30", *certificate.flags),
        trust=certificate.trust(),
    )
    yield running
    first, second = both(running)
    told: list[str] = []
    threads = [
        threading.Thread(target=lambda c=c: told.append(_read(c.chat(300, stream=True)))) for c in (first, second)
    ]
    for thread in threads:
        thread.start()
    running.until(lambda m: m["num_requests_running"] == 2, "both stream")
    assert running.stop() == 0, "".join(running.lines)
    for thread in threads:
        thread.join()
    assert len(told) == 2 and all(told), "a signal lets requests on every process finish"
    assert sum("finishing 2 requests" in line for line in running.lines) == 1, "".join(running.lines)
    assert not [line for line in running.lines if "Traceback" in line], "".join(running.lines)


def _read(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_what_all_have_counted_is_told_once_by_each(server: Server) -> None:
    server.until_idle()
    before = server.metrics()
    connections = both(server)
    streams = [connection.chat(200, stream=True) for connection in connections]
    texts = [_read(stream) for stream in streams]
    assert texts[0] == texts[1] and len(texts[0]) > 100
    server.until_idle()
    produced = before["generation_tokens_total"] + 400
    for _ in range(4):  # whichever process is asked; to each the last step may be told late
        after = server.until(lambda m: m["generation_tokens_total"] >= produced, "the last step is told")
        new = {name: after[name] - before.get(name, 0) for name in after}
        assert new["request_success_total{finished_reason=length}"] == 2
        assert new["generation_tokens_total"] == new["request_generation_tokens_sum"] == 400
        assert new["time_to_first_token_seconds_count"] == 2 and new["inter_token_latency_seconds_count"] == 398
        # Every step counts once, whoever it was for: prompts that were not cached, and tokens.
        steps = new["iteration_tokens_total_sum"]
        assert steps == 400 - 2 + new["prompt_tokens_total"] - new["prefix_cache_hits_total"]
        assert {after[f"process_open_fds{{api_worker={name}}}"] > 0 for name in ("main", "0", "1")} == {True}
    for connection in connections:
        assert connection.http.get("/load").json()["server_load"] == 0
        assert connection.http.get("/ready").status_code == 200
        assert connection.http.get("/server_info").json()["server"]["api_workers"] == 2
        live = connection.http.get("/playground/live").json()
        assert live["engine"]["model"] == "tiny" and live["pages"][0]["total"] > 0


def test_load_is_that_of_all(server: Server) -> None:
    first, second = both(server)
    with first.chat(1900, stream=True) as stream:
        next(iter(stream))
        deadline = time.monotonic() + 10
        while (told := second.http.get("/load").json())["running"] == 0:
            assert time.monotonic() < deadline, "who has no news of its own is not told, or not while it runs"
        assert told["server_load"] == 1 and told["running"] == 1 and told["ranks"][0]["running"] == 1
    server.until_idle()


def test_limits_hold_over_all(server: Server) -> None:
    first, second = both(server, "one")
    with first.chat(600, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="no more than 1"):
            second.chat()
    server.until_idle()
    deadline = time.monotonic() + 10
    while True:
        try:
            second.chat()
            break
        except openai.RateLimitError:
            assert time.monotonic() < deadline, "what has ended still counts"
    first, second = both(server, "three")
    first.chat(), second.chat(), first.chat()
    for connection in (first, second):
        with pytest.raises(openai.RateLimitError, match="3 requests a minute"):
            connection.chat()


def test_keys_are_read_again_for_all(server: Server, keys: Path) -> None:
    connections = both(server)
    try:
        keys.write_text(KEYS.replace("free", "new"))
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        for connection in connections:
            while connection.http.get("/v1/models").status_code != 401:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert connection.http.get("/v1/models", headers={"Authorization": "Bearer new"}).status_code == 200
    finally:
        keys.write_text(KEYS)
        server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 10
    while any(connection.http.get("/v1/models").status_code != 200 for connection in connections):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.process.poll() is None
    assert sum("3 in all, 1 new, 1 gone" in line for line in server.lines) == 2, "once for each change, not by each"


def test_responses_are_shared(server: Server) -> None:
    first, second = both(server)
    said = first.client.responses.create(model="tiny", input="Hello!", max_output_tokens=8)
    assert second.client.responses.retrieve(said.id).output_text == said.output_text
    went_on = second.client.responses.create(
        model="tiny", input="And then?", previous_response_id=said.id, max_output_tokens=8
    )
    assert [item.type for item in first.client.responses.input_items.list(went_on.id)] == ["message"] * 3
    with pytest.raises(openai.NotFoundError):
        both(server, "one")[0].client.responses.retrieve(said.id)
    first.client.responses.delete(said.id)
    with pytest.raises(openai.NotFoundError):
        second.client.responses.retrieve(said.id)

    long = LONG
    begun = first.client.responses.create(background=True, max_output_tokens=1500, **long)
    assert second.client.responses.cancel(begun.id).status == "cancelled"
    assert first.client.responses.retrieve(begun.id).status == "cancelled"
    stream = first.client.responses.create(background=True, stream=True, max_output_tokens=40, **long)
    identity = next(iter(stream)).response.id
    events = list(second.client.responses.retrieve(identity, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.incomplete", "response.completed")
    server.until_idle()


def test_one_that_is_killed_loses_its_own_requests_alone(server: Server) -> None:
    server.until_idle()
    before = server.metrics()
    lost, kept = both(server)
    whole = kept.chat(300).choices[0].message.content
    # New ones: one that is idle for five seconds ends, and what comes in its place may lead to the other process.
    limited, free = to(server, "one", lost.pid), to(server, "free", lost.pid)
    held, going = limited.chat(1800, stream=True), kept.chat(300, stream=True)
    next(iter(held))
    behind = free.client.responses.create(background=True, max_output_tokens=1800, **LONG)
    begun = next(iter(going))
    server.until(lambda m: m["num_requests_running"] == 3, "all three run")
    psutil.Process(lost.pid).send_signal(signal.SIGKILL)
    with pytest.raises((openai.APIConnectionError, httpx.HTTPError)):
        _read(held)
    assert (begun.choices[0].delta.content or "") + _read(going) == whole
    server.until_idle(10)
    # Whoever comes is served, at once, by those that are left, until another can serve too.
    deadline = time.monotonic() + 20
    while not any("API process" in line and "serves again" in line for line in server.lines):
        assert time.monotonic() < deadline, "no other came"
        headers = {"Authorization": "Bearer free"}
        answer = httpx.get(server.address + "/v1/models", headers=headers, timeout=20, verify=server.trust)
        assert answer.status_code == 200, answer.text
        time.sleep(0.02)
    again = both(server)
    assert lost.pid not in [connection.pid for connection in again]
    for connection in again:
        failed = connection.client.responses.retrieve(behind.id)
        assert failed.status == "failed" and "has died" in failed.error.message
        assert connection.chat(300).choices[0].message.content == whole
    both(server, "one")[0].chat()  # what the dead one held counts no more
    after = server.metrics()
    assert all(after[name] >= before[name] for name in before if name.endswith("_total"))
    assert (
        after["request_success_total{finished_reason=length}"]
        >= before["request_success_total{finished_reason=length}"] + 4
    )
    assert any(f"(process {lost.pid}) has died: signal 9" in line for line in server.lines), "".join(server.lines)


@pytest.mark.slow
def test_one_that_hangs_is_ended_and_replaced() -> None:
    server = Server("tiny", "--api-workers", "2", "--api-worker-timeout", "2", "--num-kv-pages", "512")
    try:
        hung, kept = both(server, "none")
        whole = kept.chat(300).choices[0].message.content
        held = hung.chat(1500, stream=True)
        next(iter(held))
        going = kept.chat(300, stream=True)
        psutil.Process(hung.pid).suspend()
        with pytest.raises((openai.APIConnectionError, httpx.HTTPError)):
            _read(held)
        assert _read(going) == whole
        deadline = time.monotonic() + 30
        while len(workers(server)) < 2 or hung.pid in workers(server):
            assert time.monotonic() < deadline, "no other came"
            time.sleep(0.1)
        for connection in both(server, "none"):
            assert connection.chat(300).choices[0].message.content == whole
        server.until_idle()
        said = [line for line in server.lines if "has died" in line]
        assert len(said) == 1 and f"(process {hung.pid})" in said[0] and "no sign of life for 2 s" in said[0], said
    finally:
        assert server.stop() == 0


def test_a_port_that_is_taken_is_told_once(server: Server) -> None:
    command = [sys.executable, "-m", "engine", "serve", "tiny", "--api-workers", "2", "--port", str(server.port)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and found.stderr.count("error:") == 1 and "in use" in found.stderr, found.stderr


def _serial(server: Server) -> str:
    """Of the certificate that a new connection is shown."""
    assert isinstance(server.trust, ssl.SSLContext)
    with (
        socket.create_connection(("127.0.0.1", server.port), 10) as plain,
        server.trust.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        shown = secured.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_each_has_the_certificate_also_when_it_is_renewed(server: Server, certificate: Certificate) -> None:
    assert server.address.startswith("https://")
    for stranger in (server.address, server.address.replace("https", "http")):
        with pytest.raises(httpx.TransportError):
            httpx.get(stranger + "/health")
    before = _serial(server)
    certificate.renew()
    deadline = time.monotonic() + 20
    while before in [_serial(server) for _ in range(12)]:
        assert time.monotonic() < deadline, "a process has the old certificate"
        time.sleep(0.1)


@pytest.mark.slow
def test_with_several_cores() -> None:
    """Two API processes before two cores, one of which is killed: both hear of it, and of what comes in its place."""
    server = Server(
        *("tiny", "--api-workers", "2", "--data-parallel-size", "2", "--data-parallel-restarts", "1"),
        *("--num-kv-pages", "512", "--max-num-seqs", "8", "--log-format", "json", "--access-log"),
    )
    try:
        connections = both(server, "none")
        texts = {connection.chat().choices[0].message.content for connection in connections * 2}
        assert len(texts) == 1
        children = psutil.Process(server.process.pid).children()
        cores = [child for child in children if "engine.loop.process" in child.cmdline()]
        assert len(cores) == 2
        streams = [connection.chat(1500, stream=True) for connection in (*connections, *both(server, "none"))]
        for stream in streams:  # one of which no token has come yet would be computed again by the other core
            next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
        cores[0].kill()
        ended = 0
        for stream in streams:
            try:
                ended += len(_read(stream)) > 100
            except openai.APIError as error:
                assert "rank" in str(error)
        assert 0 < ended < 4, "those on the other core go on"

        def stands(told: dict[str, float]) -> bool:
            return told["engine_up"] == 1 == told["engine_up{engine=1}"]

        for connection in connections:
            server.until(stands, "the core stands again")
            for _ in range(2):
                assert connection.chat().choices[0].message.content in texts
        server.until_idle()
    finally:
        assert server.stop() == 0
    told = [json.loads(line) for line in server.lines if line.startswith("{")]
    access = [line for line in told if line["logger"] == "engine.access"]
    assert {line["api_worker"] for line in access} == {0, 1} and all("request_id" in line for line in access)
    assert sum("has died" in line["message"] for line in told) == 1, "whoever started it says so, once"


@pytest.mark.parametrize("plainly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_start_that_fails_and_a_stop_in_a_hurry(request: pytest.FixtureRequest, plainly: bool) -> None:
    """What is wrong is said once; and a second signal ends all at once. Plainly: eight processes import torch. That one
    that is started so has the listener is what `core/tests/process/test_child.py` asks."""
    if plainly:
        request.getfixturevalue("plain_processes")
    command = [sys.executable, "-m", "engine", "serve", "no-such-model", "--api-workers", "2", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and found.stderr.count("error:") == 1, found.stderr
    server = Server("tiny", "--api-workers", "2", "--shutdown-timeout", "60")
    stream = both(server, "none")[0].chat(1800, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGINT)
    while not any("finishing 1 requests" in line for line in server.lines):
        time.sleep(0.02)
    began = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - began < 8
