"""The gate and the body's limits around a small application, without a server."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from gates import Echo, gate
from starlette.types import Message, Receive, Scope, Send

from engine_server.bodies import LARGE, MOST
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase
from engine_server.middleware import OPEN_PATHS, Entry


@pytest.mark.parametrize(
    ("phase", "code", "seconds"), [(Phase.STARTING, "starting", 5), (Phase.DRAINING, "shutting_down", 8)]
)
async def test_only_a_serving_server_takes_requests(phase: Phase, code: str, seconds: int) -> None:
    lifecycle = Lifecycle()
    async with gate(Echo(), lifecycle) as client:
        lifecycle.phase = phase
        answer = await client.post("/v1/completions", content=b"x")
        assert answer.status_code == 503 and answer.headers["retry-after"] == str(seconds)
        assert answer.json()["error"]["code"] == code and answer.headers["connection"] == "close"
        for path in OPEN_PATHS:
            assert (await client.get(path)).status_code == 200
        lifecycle.phase = Phase.SERVING
        assert (await client.post("/v1/completions", content=b"x")).content == b"x"


async def test_pages_are_for_everybody_to_get_and_no_more() -> None:
    lifecycle = Lifecycle()
    keys = KeyRing(("secret",))
    async with gate(Echo(), lifecycle, keys, pages=("/", "/page.css")) as client:
        for phase in (Phase.STARTING, Phase.SERVING, Phase.DRAINING):
            lifecycle.phase = phase
            for path in ("/", "/page.css"):
                assert (await client.get(path)).status_code == 200
                assert (await client.post(path)).status_code == 401
            for path in ("/page.css/", "/page", "/v1/models"):
                assert (await client.get(path)).status_code == 401, "a stranger is told no more"


async def test_requests_in_progress_are_counted() -> None:
    lifecycle, echo = Lifecycle(), Echo()
    lifecycle.phase = Phase.SERVING
    await lifecycle.idle()
    echo.go.clear()
    async with gate(echo, lifecycle) as client:
        asking = [asyncio.ensure_future(client.post("/v1/x", content=b"x")) for _ in range(3)]
        while lifecycle.active < 3:
            await asyncio.sleep(0)
        idle = asyncio.ensure_future(lifecycle.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        asking[0].cancel()
        echo.go.set()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.wait_for(idle, 5)
    assert lifecycle.active == 0


async def limited(
    *messages: Message, length: int | None = None, max_body: int = 10, kind: bytes = b"application/json"
) -> tuple[list[Message], list[bytes]]:
    """What a body limit (of 10 bytes, by itself) answers to these messages, and what the application got."""
    echo, sent, pending = Echo(), [], list(messages)

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()  # the client sends no more
        return pending.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", kind)] if kind else []
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    timeout = 0.05 if max_body == 10 else 60
    await Entry(echo, Counter(), max_body=max_body, timeout=timeout)(scope, receive, send)
    return sent, echo.bodies


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_arrives_whole() -> None:
    sent, bodies = await limited(part(b"12345"), part(b""), part(b"67890", False))
    assert bodies == [b"1234567890"] and sent[0]["status"] == 200


@pytest.mark.parametrize(
    ("messages", "length", "status"),
    [
        ([part(b"1")], 11, 413),
        ([part(b"12345"), part(b"678901"), part(b"2", False)], None, 413),
        ([part(b"1")], 5, 408),
    ],
)
async def test_a_body_that_is_refused(messages: list[Message], length: int | None, status: int) -> None:
    sent, bodies = await limited(*messages, length=length)
    assert bodies == [b""] and sent[0]["status"] == status and len(sent) == 3, (
        "whatever the application says to nothing"
    )
    assert (b"connection", b"close") in sent[0]["headers"]
    assert [message.get("more_body") for message in sent[1:]] == [True, False]


async def test_one_that_is_refused_when_it_has_come_leaves_the_connection() -> None:
    """Nothing is left of it that would have to be waited for."""
    sent, bodies = await limited(part(b"12345"), part(b"678901", False))
    assert bodies == [b""] and sent[0]["status"] == 413 and b"has 11 bytes" in sent[1]["body"]
    assert b"connection" not in dict(sent[0]["headers"]) and not sent[1]["more_body"]


def listed(unit: bytes, count: int) -> bytes:
    """So many of these in a list, and enough blanks to be looked through."""
    return b"[" + b",".join([unit] * count) + b" " * LARGE + b"]"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (listed(b"1", MOST.values - 1), True),
        (listed(b"1", MOST.values + 1), False),
        (listed(b'""', MOST.objects - 1), True),
        (listed(b'""', MOST.objects + 1), False),
        (listed(b"{}", MOST.objects + 1), False),
        (listed(b'{"a":1}', MOST.objects // 2 + 1), False),
        (listed(b'{"a":1}', MOST.objects // 2 + 1)[:-1], False),  # that it is no JSON would show too late
        (b'["' + b"[," * MOST.values + b'"]', True),
    ],
    ids=["numbers", "too many", "texts", "too many texts", "too many objects", "with fields", "not closed", "a text"],
)
async def test_what_json_makes_is_counted_before_it_is_read(body: bytes, fits: bool) -> None:
    for kind in (b"application/json", b"application/vnd.x+json", b""):
        sent, bodies = await limited(part(body, False), max_body=2**30, kind=kind)
        assert sent[0]["status"] == (200 if fits else 413) and bodies == [body if fits else b""]
        assert fits or b"body_too_large" in sent[1]["body"]
    sent, bodies = await limited(part(body, False), max_body=2**30, kind=b"text/plain")
    assert sent[0]["status"] == 200, "only JSON makes objects"


async def test_a_client_that_leaves_gets_no_answer() -> None:
    sent, bodies = await limited(part(b"1"), {"type": "http.disconnect"})
    assert bodies == [b""] and sent[0]["status"] == 200, "what nobody hears"


async def test_a_body_that_nobody_asks_for_is_not_read() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("who is not let in sends what he likes")

    async def closed(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"999")]}
    await Entry(closed, Counter(), max_body=10, timeout=1)(scope, receive, send)
    assert sent[0]["status"] == 401
