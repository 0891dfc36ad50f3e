"""Two real servers and the router, with the official client: one computes prompts, the other goes on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from .conftest import Server

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("disaggregation")]
LONG = "Once upon a time there was a small engine that computed prompts for a larger one. " * 3
MESSAGES: Any = [{"role": "user", "content": LONG + "What is 2 + 3?"}]
WAYS = (("--order", "prefill-first"), ("--order", "decode-first"), ("--overlap",))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def serve(role: str, *more: str, folder: str | None = None) -> Server:
    connector = ("--kv-role", role, "--kv-connector", "tcp", "--kv-connector.port", str(free_port()))
    environment = {**os.environ, "TMPDIR": folder} if folder else None
    return Server("tiny", "--dtype", "float64", *connector, *more, environment=environment)


def route(p: Server, d: Server, *way: str) -> Server:
    return Server("--prefill", p.address, "--decode", d.address, *way, command="route")


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Server, Server]]:
    p, d = serve("prefill"), serve("decode")
    yield p, d
    assert p.stop() == 0, "".join(p.lines)
    assert d.stop() == 0, "".join(d.lines)


def ask(client: openai.OpenAI, n: int) -> list[Any]:
    """Every API, streamed and not; `n` tells one round's prompts from another's."""
    found: list[Any] = []
    salt: Any = {"extra_body": {"cache_salt": f"round {n}"}}
    for temperature in (0.0, 0.9):
        drawn: Any = {"model": "tiny", "temperature": temperature, "seed": 7, **salt}
        whole = client.chat.completions.create(messages=MESSAGES, max_tokens=20, **drawn)
        found.append(whole.choices[0].message.content)
        stream = client.chat.completions.create(messages=MESSAGES, max_tokens=20, stream=True, **drawn)
        found.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        text = client.completions.create(prompt=LONG, max_tokens=20, **drawn)
        found += [text.choices[0].text, text.usage and (text.usage.prompt_tokens, text.usage.completion_tokens)]
    reply = client.responses.create(model="tiny", input=LONG, max_output_tokens=20, temperature=0, extra_body={})
    return [*found, reply.output_text]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """They know of a folder, and nothing of each other."""
    connector = ("--kv-connector", "file", "--kv-connector.path", str(tmp_path_factory.mktemp("pool")))
    p, d = (Server("tiny", "--dtype", "float64", *connector) for _ in range(2))
    yield p, d
    assert p.stop() == 0, "".join(p.lines)
    assert d.stop() == 0, "".join(d.lines)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[-1])
def test_answers_are_those_of_one_server(two: tuple[Server, Server], server: Server, way: tuple[str, ...]) -> None:
    divided(*two, server, way)


def test_answers_by_a_pool_are_those_of_one_server(pooled: tuple[Server, Server], server: Server) -> None:
    divided(*pooled, server, ())
    assert pooled[1].metrics().get("kv_connector_events_total{connector=file,event=never_came}", 0) == 0


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way[-1])
def test_nobody_pushes_into_a_pool(pooled: tuple[Server, Server], way: tuple[str, ...]) -> None:
    p, d = pooled
    named = ("--prefill", p.address, "--decode", d.address, *way, "--port", "0")
    refused = subprocess.run([sys.executable, "-m", "engine", "route", *named], capture_output=True, text=True)
    assert refused.returncode and "its kv_connector is file" in refused.stderr and "in a pool" in refused.stderr


def divided(p: Server, d: Server, server: Server, way: tuple[str, ...]) -> None:
    """All that a router in front of these two answers is what one server answers, and no prompt is computed again."""
    before, n = p.metrics()["prompt_tokens_total"], WAYS.index(way) if way else 9
    router = route(p, d, *way)
    try:
        assert ask(router.client(), n) == ask(server.client(), n)
        client = router.client()
        one = client.completions.create(
            model="tiny", prompt=LONG, max_tokens=2, extra_body={"cache_salt": f"cached {way}"}
        )
        assert one.usage is not None and one.usage.prompt_tokens_details is not None
        assert (one.usage.prompt_tokens_details.cached_tokens or 0) > one.usage.prompt_tokens - 17
        page = httpx.get(router.address + "/metrics").text
        assert "engine_router:whole_requests_total{" not in page, page
        assert p.metrics()["prompt_tokens_total"] - before > 8 * 40
        p.until_idle()  # all pages that were held are back
        d.until_idle()
    finally:
        assert router.stop() == 0, "".join(router.lines)


def test_a_server_for_prompts_that_is_killed(two: tuple[Server, Server], server: Server) -> None:
    _, d = two
    p = serve("prefill")
    router = route(p, d)
    try:
        assert ask(router.client(), 7) == ask(server.client(), 7)
        p.process.send_signal(signal.SIGKILL)
        p.process.wait()
        assert ask(router.client(), 8) == ask(server.client(), 8)
        assert 'reason="no_prefill_server"' in httpx.get(router.address + "/metrics").text
        assert httpx.get(router.address + "/health").json()["status"] == "degraded"
        d.until_idle()
    finally:
        assert router.stop() == 0, "".join(router.lines)


def kill(server: Server) -> None:
    """All its processes, at once."""
    core = server.core_pid()
    server.process.kill()
    os.kill(core, signal.SIGKILL)
    server.process.wait()


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way[-1])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_server_that_is_killed_in_mid_transfer(server: Server, way: tuple[str, ...], who: str) -> None:
    """While the first computes chunk after chunk, which travel: the answer is one server's, and the others' pages are
    free again, and their cores at rest."""
    hasty = ("--kv-connector.lease_seconds", "2", "--kv-connector.push_timeout", "3", "--kv-connector.timeout", "1")
    folder = tempfile.mkdtemp(prefix="kill-")  # who is killed leaves its sockets
    p = serve("prefill", "--max-num-batched-tokens", "64", *hasty, folder=folder)
    d = serve("decode", *hasty, folder=folder)
    router = route(p, d, *way)
    prompt = LONG * 8
    asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.0}
    try:
        expected = server.client().completions.create(**asked).choices[0].text
        found: list[Any] = []

        def ask_once() -> None:
            try:
                found.append(router.client().completions.create(**asked).choices[0].text)
            except openai.APIError as error:
                found.append(error)

        asking = threading.Thread(target=ask_once)
        asking.start()
        p.until(lambda m: m["num_requests_running"] > 0, "the prompt is computed")
        kill(p if who == "prefill" else d)
        asking.join(60)
        living = d if who == "prefill" else p
        if who == "prefill":
            assert found == [expected]
        else:
            assert isinstance(found[0], openai.APIError), "nobody is left to go on"
        living.until_idle()
        before = psutil.Process(living.core_pid()).cpu_times()
        time.sleep(1)
        after = psutil.Process(living.core_pid()).cpu_times()
        assert after.user + after.system - before.user - before.system < 0.3, "it waits at full speed"
    finally:
        router.stop()
        for one in (p, d):
            if one.process.poll() is None:
                one.stop()
        shutil.rmtree(folder)
