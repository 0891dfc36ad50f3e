"""Whatever way an event takes, all arrive, in order, once: at once while the client reads, put together while not."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.frontend.request_state import OutputKind, RequestState, RequestStream
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingParams
from engine_server import stream as sse
from engine_server.stream import TokenStream
from engine_server.uvicorn_server import bounded_protocol

WRITE_BODY: Any = bounded_protocol(1.0, 1.0, 1).write_body  # type: ignore[attr-defined]


class Connection:
    """uvicorn's side: what was written, and whether the client reads."""

    def __init__(self) -> None:
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = self
        self.disconnected = self.response_complete = False
        self.chunked_encoding = True
        self.chunks: list[bytes] = []
        self.sends = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()

    def pause(self, paused: bool) -> None:
        self.flow.write_paused = paused
        self.reads.clear() if paused else self.reads.set()

    def write(self, data: bytes) -> None:
        assert not self.flow.write_paused, "written although the client does not read"
        size, _, rest = data.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
        self.chunks.append(rest[:-2])

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sends += 1
        if message["type"] == "http.response.body" and message["body"]:
            self.chunks.append(message["body"])

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Told:
    """Events that say which tokens they bring."""

    def opening(self) -> bytes:
        return b"<"

    def told(self, output: RequestOutput) -> bytes:
        if 666 in output.outputs[0].token_ids:
            raise ValueError("cannot be told")
        return "".join(f"[{token}]" for token in output.outputs[0].token_ids).encode()

    def closing(self) -> bytes:
        return b">"


def delta(token: int, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, "x", [token], None, None, "length" if finished else None)
    return RequestOutput("r", None, [1], [completion], finished)


def stream(aborted: list[str]) -> RequestStream:
    request = RequestState("r", None, [1], SamplingParams(), [], kind=OutputKind.DELTA)
    return RequestStream(aborted.append, request)


def scope(connection: Connection, alone: bool = True) -> dict[str, Any]:
    return {"type": "http", "state": {sse.WRITE_BODY: functools.partial(WRITE_BODY, connection) if alone else None}}


STEPS = st.lists(st.sampled_from(["token", "pause", "resume", "turn"]), max_size=40)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.booleans())
def test_nothing_is_lost_doubled_or_reordered(steps: list[str], alone: bool) -> None:
    async def run() -> tuple[Connection, int]:
        connection, source = Connection(), stream([])
        answer = asyncio.ensure_future(
            TokenStream(Told(), source, "id")(scope(connection, alone), connection.receive, connection.send)
        )
        count = 0
        for step in steps:
            if step == "token":
                source.put(delta(count))
                count += 1
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                connection.pause(step == "pause")
        source.put(delta(count, finished=True))
        connection.pause(False)
        await asyncio.wait_for(answer, 5)
        return connection, count

    connection, count = asyncio.run(run())
    told = "".join(f"[{token}]" for token in range(count + 1))
    assert b"".join(connection.chunks).decode() == f"<{told}>data: [DONE]\n\n"


async def test_a_reader_that_keeps_up_gets_one_event_a_token_and_no_task_is_woken() -> None:
    connection, source = Connection(), stream([])
    answer = asyncio.ensure_future(
        TokenStream(Told(), source, "id")(scope(connection), connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    sends = connection.sends
    for token in range(20):
        source.put(delta(token))  # without a turn of the loop in between
    assert connection.chunks[1:] == [f"[{token}]".encode() for token in range(20)] and connection.sends == sends
    connection.pause(True)
    for token in range(20, 25):
        source.put(delta(token))
        await asyncio.sleep(0)
    connection.pause(False)
    await asyncio.sleep(0.01)
    assert b"".join(connection.chunks[21:]) == b"[20][21][22][23][24]"
    assert len(connection.chunks[21:]) <= 2, "what waited is put together"
    source.put(delta(25))
    assert connection.chunks[-1] == b"[25]"
    source.put(delta(26, finished=True))
    await asyncio.wait_for(answer, 5)


@pytest.mark.parametrize("alone", [True, False])
async def test_what_cannot_be_told_is_the_streams_end_and_nobody_elses(alone: bool) -> None:
    aborted: list[str] = []
    connection, source = Connection(), stream(aborted)
    answer = asyncio.ensure_future(
        TokenStream(Told(), source, "id")(scope(connection, alone), connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    source.put(delta(1))
    await asyncio.sleep(0.01)
    source.put(delta(666))
    source.put(delta(2))
    await asyncio.wait_for(answer, 5)
    text = b"".join(connection.chunks).decode()
    assert text.startswith("<[1]data: ") and '"error"' in text and text.endswith("data: [DONE]\n\n")
    assert "[2]" not in text and aborted == ["r"]


async def test_a_client_that_leaves_ends_the_request() -> None:
    aborted: list[str] = []
    connection, source = Connection(), stream(aborted)
    answer = asyncio.ensure_future(
        TokenStream(Told(), source, "id")(scope(connection), connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    source.put(delta(1))
    connection.disconnected = True
    connection.gone.set()
    source.put(delta(2))
    await asyncio.wait_for(answer, 5)
    assert connection.chunks == [b"<", b"[1]"] and aborted == ["r"]
