"""The access log says how a request ended, whatever status its answer began with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from engine.types.errors import RequestTimeoutError, ShuttingDownError
from engine_server import stream as sse
from engine_server.anthropic import routes as messages_answer
from engine_server.conversation.completion import Blocks
from engine_server.lifecycle import ACCESS_LOG
from engine_server.middleware import Entry
from engine_server.responses import answer as responses_answer

MAKER = responses_answer.ResponseMaker({"id": "r"}, Blocks(None), len, None)  # type: ignore[arg-type]


async def events(error: Exception | None) -> AsyncGenerator[bytes]:
    yield b"data: 1\n\n"
    if error is not None:
        raise error


def stream(error: Exception | None, tell_error: sse.TellError = sse.openai_error) -> sse.EventStream:
    return sse.EventStream(events(error), (), "name", tell_error)


def serve(app: Any, leaves: bool = False) -> tuple[str, dict[str, Any], bytes]:
    """The line of the log, its fields, and what the client got."""
    got: list[bytes] = []
    records: list[logging.LogRecord] = []
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message.get("body", b""))
        if leaves and message.get("body"):
            gone.set()
            await asyncio.sleep(3600)

    async def run() -> None:
        scope = {"type": "http", "path": "/v1/x", "method": "POST", "headers": [], "client": ("127.0.0.1", 9)}
        with contextlib.suppress(ZeroDivisionError):
            await Entry(app, Counter(), max_body=10**6, timeout=5, access_log=True)(scope, receive, send)

    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    log = logging.getLogger(ACCESS_LOG)
    level, log.level = log.level, logging.INFO
    log.addHandler(handler)
    try:
        asyncio.run(run())
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    (record,) = records
    return record.getMessage(), vars(record)["fields"], b"".join(got)


@pytest.mark.parametrize(
    "tell_error", [sse.openai_error, messages_answer.tell_error, responses_answer.tell_error, MAKER.tell_error]
)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ShuttingDownError("go on", "the server was stopped"), 503, b'"shutting_down"'),
        (RequestTimeoutError("go on", "time is up"), 504, b'"request_timeout"'),
        (ZeroDivisionError("secret"), 500, b'"internal_error"'),
    ],
)
def test_a_stream_that_fails_is_logged_with_the_status_of_its_error(
    tell_error: sse.TellError, error: Exception, status: int, code: bytes
) -> None:
    line, fields, got = serve(stream(error, tell_error))
    assert f"POST /v1/x {status} " in line and line.endswith(" s, in mid-stream")
    assert fields["status"] == status and fields["in_stream"] is True
    assert got.startswith(b"data: 1") and code in got and b"secret" not in got


def test_one_that_its_client_leaves() -> None:
    line, fields, _ = serve(stream(None), leaves=True)
    assert "POST /v1/x 499 " in line and fields["in_stream"] is True


def test_a_plugins_stream_that_fails() -> None:
    line, fields, _ = serve(StreamingResponse(events(ZeroDivisionError())))
    assert "POST /v1/x 500 " in line and fields["status"] == 500 and fields["in_stream"] is True


@pytest.mark.parametrize(
    ("app", "status"),
    [(lambda: stream(None), 200), (lambda: JSONResponse({}), 200), (lambda: JSONResponse({}, 503), 503)],
)
def test_others_are_logged_with_the_status_that_was_sent(app: Callable[[], Any], status: int) -> None:
    line, fields, _ = serve(app())
    assert f"POST /v1/x {status} " in line and line.endswith(" s") and "in_stream" not in fields
