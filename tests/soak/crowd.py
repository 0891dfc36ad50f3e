"""A crowd of clients: some ask and read, some leave, some read slowly, some send what nobody can answer."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from .requests import Bad, Good, bad_requests, good_requests, long_request

CLIENTS = 12
"""How many of them there are at once."""
KINDS = {"ask": 10, "leave": 4, "give_up": 2, "crawl": 1, "send_bad": 3, "be_late": 1, "background": 1}
"""What one of them does next, and how often."""


class Crowd:
    """`CLIENTS` clients, each doing one thing after the other.

    Args:
        address: of the server.
        answers: of a quiet server, by the requests' names.
        seed: of everything that is drawn.
        longest: tokens of a long answer; those that are read are read to their end.
    """

    def __init__(self, address: str, answers: dict[str, Any], seed: int, longest: int) -> None:
        self._address = address
        self._answers = answers
        self._seed = seed
        self._longest = longest
        self._good = good_requests()
        self._bad = bad_requests()
        self.wrong: list[str] = []
        """What was not as it must be."""
        self.done: collections.Counter[str] = collections.Counter()
        """How often which was done."""

    async def run(self, go_on: Callable[[], bool]) -> None:
        """Until `go_on` says no; what has begun then ends."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=self._address, timeout=600, limits=limits) as client:
            await asyncio.gather(
                *(self._one(client, random.Random(f"{self._seed}-{i}"), go_on) for i in range(CLIENTS))
            )

    async def _one(self, client: httpx.AsyncClient, draw: random.Random, go_on: Callable[[], bool]) -> None:
        kinds = list(KINDS)
        while go_on() and not self.wrong:
            (kind,) = draw.choices(kinds, list(KINDS.values()))
            try:
                await getattr(self, "_" + kind)(client, draw)
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:500])
            self.done[kind] += 1

    async def _ask(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """The answer is the quiet server's, whole or streamed."""
        request = draw.choice(self._good)
        if request.pieces is not None and draw.random() < 0.6:
            async with client.stream("POST", request.path, json={**request.body, "stream": True}) as reply:
                assert reply.status_code == 200, await reply.aread()
                found = request.pieces([event async for event in _events(reply)])
        else:
            reply = await client.post(request.path, json=request.body)
            assert reply.status_code == 200, reply.text
            found = request.whole(reply.json())
        expected = self._answers[request.name]
        assert found == expected, f"{request.name[:200]}: {found!r:.200}, and a quiet server says {expected!r:.200}"

    async def _leave(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """In the middle of a stream."""
        path, body = long_request(draw, self._longest)
        async with client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, await reply.aread()
            left = draw.randint(0, 12)
            async for _ in _events(reply):
                left -= 1
                if left < 0:
                    return

    async def _give_up(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Wait for a whole answer, and then no longer."""
        path, body = long_request(draw, self._longest)
        with contextlib.suppress(httpx.ReadTimeout):
            await client.post(path, json=body, timeout=draw.uniform(0.01, 0.5))

    async def _crawl(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Read a stream, a little at a time; to its end, or not."""
        path, body = long_request(draw, self._longest)
        content = json.dumps({**body, "stream": True}).encode()
        host, port = self._address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            last, slow = b"", draw.randint(5, 30)
            while piece := await reader.read(2048 if slow else 2**16):
                last = (last + piece)[-64:]
                if slow:
                    slow -= 1
                    await asyncio.sleep(0.1)
                    if not slow and draw.random() < 0.5:
                        return
            assert last.endswith(b"0\r\n\r\n"), f"{path}: a stream that is read slowly ends with {last!r}"
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _send_bad(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        await _send(client, draw.choice(self._bad))

    async def _be_late(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """A deadline that passes: a 504, or an answer that was there in time."""
        path, body = long_request(draw, self._longest)
        reply = await client.post(path, json={**body, "timeout": draw.uniform(0.001, 0.3)})
        assert reply.status_code in (200, 504), reply.text

    async def _background(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """A response that is computed while nobody waits, and is cancelled, deleted, or waited for."""
        text = {"input": "Tell me a long story.", "temperature": 1.0, "seed": draw.randrange(2**31)}
        made = (await client.post("/v1/responses", json={**text, "background": True})).json()
        where = f"/v1/responses/{made['id']}"
        await asyncio.sleep(draw.uniform(0, 0.3))
        if draw.random() < 0.5:
            await client.post(where + "/cancel")
        reply = await client.get(where)
        assert reply.status_code == 200 and reply.json()["status"] in (
            "in_progress",
            "completed",
            "incomplete",
            "cancelled",
        )
        assert (await client.delete(where)).status_code == 200
        assert (await client.get(where)).status_code == 404


async def quiet_answers(address: str, requests: list[Good]) -> dict[str, Any]:
    """By name: what each request is answered alone."""
    answers: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        for request in requests:
            reply = await client.post(request.path, json=request.body)
            assert reply.status_code == 200, f"{request}: {reply.text}"
            answers[request.name] = request.whole(reply.json())
    return answers


async def quiet_refusals(address: str) -> None:
    """Send what nobody can answer. Each grammar driver is asked for what the one before refuses, and has its process
    from now on."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        for bad in bad_requests():
            await _send(client, bad)


async def _send(client: httpx.AsyncClient, bad: Bad) -> None:
    headers = {"content-type": "application/json"}
    reply = await client.request(bad.method, bad.path, content=bad.content, headers=headers)
    assert 400 <= reply.status_code < 500, f"{bad}: {reply.status_code} {reply.text:.200}"
    assert reply.json()["error"]["message"], bad


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event or event["error"] is None, event
            yield event
