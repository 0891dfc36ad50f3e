"""One streamed HTTP request: its bytes as they came, and what they say once the run is over.

While a run lasts, a piece of an answer is only stored with its time: nothing is parsed, so the load generator stays
far from being the bottleneck. One connection a request, as with independent users; connecting counts.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

_HEAD_END = b"\r\n\r\n"
_STREAM_END = b"0\r\n\r\n"
_EVENT = re.compile(rb"data: ?(.*?)\r?\n\r?\n", re.DOTALL)
_DONE = b"[DONE]"


class Target(NamedTuple):
    """Where requests go.

    Args:
        host, port, tls: of the server.
        path: of the base address, "" for none.
        api_key: sent as bearer token; None sends none.
    """

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None

    def encode(self, method: str, path: str, body: Any = None) -> bytes:
        """A whole request; the server is to close the connection after its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            f"Content-Length: {len(content)}",
        ]
        lines += ["Content-Type: application/json"] if body is not None else []
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join(lines).encode() + _HEAD_END + content


@dataclass
class Exchange:
    """What was sent and what came back; times are `time.perf_counter`'s.

    Attributes:
        planned: when the request was to be sent.
        sent: when its connection was begun.
        pieces: (time, bytes) of the answer.
        fault: a word for what ended it before its time, "" for nothing.
    """

    planned: float
    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    fault: str = ""


class Outcome(NamedTuple):
    """A finished request; seconds from its planned arrival.

    Args:
        error: a word for what went wrong, e.g. "http_503"; "" where the request completed.
        times: of the events that brought tokens.
        input_tokens, output_tokens: as the server counted them.
        cached_tokens: of the input, found in the prefix cache; None where the server does not say.
        finish_reason: why the answer ended, "length" for all its tokens; "" where the server does not say.
    """

    error: str
    times: list[float]
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str = ""


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes, exchange: Exchange, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._exchange = exchange
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._exchange.pieces.append((time.perf_counter(), data))
        if data.endswith(_STREAM_END):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self._ended.done():
            self._exchange.fault = fault_of(error)
        self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def fault_of(error: BaseException) -> str:
    """A word for what a connection failed with."""
    match error:
        case TimeoutError():
            return "timeout"
        case ConnectionRefusedError():
            return "refused"
        case ConnectionResetError() | BrokenPipeError():
            return "reset"
        case OSError(errno=code) if code:
            return errno.errorcode.get(code, f"os_{code}").lower()
    return type(error).__name__.lower()


async def send(target: Target, request: bytes, exchange: Exchange, timeout: float) -> None:
    """Send a request and store the answer in `exchange`; never raises for what the network or the server does.

    Args:
        timeout: seconds for connecting and the whole answer.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    exchange.sent = time.perf_counter()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(
                lambda: _Connection(request, exchange, ended), target.host, target.port, ssl=target.tls or None
            )
            await ended
    except OSError as error:  # TimeoutError is one
        exchange.fault = fault_of(error)
    finally:
        ended.cancel()
        if transport is not None:
            transport.close()


def read_text(exchange: Exchange) -> str:
    """What a chat completion that completed said; thoughts are left out."""
    raw = b"".join(piece for _, piece in exchange.pieces).partition(_HEAD_END)
    body = _unchunk(raw[2], 0)[0] if _read_head(raw[0])[1] else raw[2]
    choices = [json.loads(content).get("choices") for _, content in _events(body) if content != _DONE]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


def read_outcome(exchange: Exchange) -> Outcome:
    """What an exchange was: the events of its answer, or why there are none."""
    data = b"".join(piece for _, piece in exchange.pieces)
    head, separator, raw = data.partition(_HEAD_END)
    if not separator:
        return Outcome(exchange.fault or "closed", [])
    status, chunked = _read_head(head)
    if status != 200:
        return Outcome(f"http_{status}", [])
    decoded, places = _unchunk(raw, len(head) + len(separator)) if chunked else (raw, [(len(raw), len(data))])
    return _read_events(exchange, decoded, places)


def read_json(exchange: Exchange) -> Any:
    """The body of an answer that was no stream. Raises ValueError where it is none or no JSON."""
    head, _, raw = b"".join(piece for _, piece in exchange.pieces).partition(_HEAD_END)
    status, chunked = _read_head(head)
    if status != 200:
        raise ValueError(exchange.fault or f"HTTP status {status}")
    return json.loads(_unchunk(raw, 0)[0] if chunked else raw)


def _read_head(head: bytes) -> tuple[int, bool]:
    """The status (0 for no HTTP), and whether the body comes in chunks."""
    found = re.match(rb"HTTP/1\.\d (\d{3})", head)
    return int(found.group(1)) if found else 0, b"transfer-encoding: chunked" in head.lower()


def _unchunk(raw: bytes, offset: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The body that chunks carry, as far as they are whole; for each, where it ends in the body and in the answer."""
    parts, places, at, length = [], [], 0, 0
    while (line := raw.find(b"\r\n", at)) >= 0:
        try:
            size = int(raw[at:line].partition(b";")[0], 16)
        except ValueError:
            break
        start, end = line + 2, line + 2 + size
        if size == 0 or end > len(raw):
            break
        parts.append(raw[start:end])
        length += size
        places.append((length, offset + end))
        at = end + 2
    return b"".join(parts), places


def _read_events(exchange: Exchange, body: bytes, places: list[tuple[int, int]]) -> Outcome:
    arrived = list(accumulate(len(piece) for _, piece in exchange.pieces))
    ends = [end for end, _ in places]
    times: list[float] = []
    tokens_in = tokens_out = 0
    cached: int | None = None
    finish = ""
    for end, content in _events(body):
        if content == _DONE:
            return Outcome("", times, tokens_in, tokens_out, cached, finish) if times else Outcome("no_tokens", [])
        try:
            event = json.loads(content)
        except ValueError:
            return Outcome("bad_event", times)
        if "error" in event:
            return Outcome(f"stream_{_word(event['error'])}", times)
        if usage := event.get("usage"):
            tokens_in, tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = event.get("choices")
        if choices:
            finish = choices[0].get("finish_reason") or finish
        if choices and _brings_tokens(choices[0]):
            place = bisect_left(ends, end)
            in_answer = places[place][1] - (ends[place] - end)
            piece = bisect_left(arrived, in_answer)
            times.append(exchange.pieces[piece][0] - exchange.planned)
    return Outcome(exchange.fault or "closed", times)


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """Of a chat's events the first only says who speaks, and the last may only say why it ends."""
    delta = choice.get("delta")
    return delta is None or any(value for name, value in delta.items() if name != "role")


def _events(body: bytes) -> Iterator[tuple[int, bytes]]:
    for found in _EVENT.finditer(body):
        yield found.end(), found.group(1)


def _word(error: Any) -> str:
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return re.sub(r"\W+", "_", str(code or "error")).lower()
