"""Runs a batch: every request goes through the server's own routes, in this process and without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message

from engine.embedding import AsyncLLM, EngineConfig
from engine.types.errors import EngineError
from engine_server.app import create_app
from engine_server.batch_file import BatchRequest, Results
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

_ANY_QUEUE = 2**31 - 1
"""The batch itself limits how many requests wait."""
QUEUED_PER_PLACE = 2
"""Requests under way for each that can run: the next is there when one ends."""


class Count(NamedTuple):
    """What became of the requests that were sent.

    Attributes:
        failed: with an error for a result.
        postponed: that the engine could not take now (503), so that there is no result: to be sent again.
    """

    failed: int
    postponed: int


def run_batch(
    config: EngineConfig, requests: Sequence[BatchRequest], results: Results, advance: Callable[[], Any]
) -> Count:
    """Send every request, `QUEUED_PER_PLACE` for each place at once; results are written as they come.

    Args:
        config: of the engine, which is started and shut down here.
        requests: to send.
        results: open.
        advance: called after each.

    Raises:
        EngineError: of the start; EngineDeadError where the engine died, InvalidRequestError where a result could not
            be written. What was written stays.
    """
    llm = AsyncLLM(config)
    try:
        with asyncio.Runner() as runner:
            return runner.run(_Run(llm, requests, results, advance).run())
    finally:
        llm.shutdown()


class _Run:
    """One batch in its event loop."""

    def __init__(
        self, llm: AsyncLLM, requests: Sequence[BatchRequest], results: Results, advance: Callable[[], Any]
    ) -> None:
        self._llm = llm
        self._results = results
        self._advance = advance
        self._at_once = max(1, QUEUED_PER_PLACE * llm.config.max_num_seqs * llm.config.data_parallel_size)
        self._left = iter(requests)
        self._failed = self._postponed = 0
        self._dead: asyncio.Future[Any]

    async def run(self) -> Count:
        self._dead = asyncio.get_running_loop().create_future()
        await self._llm.start(self._on_death)
        lifecycle = Lifecycle()
        lifecycle.phase = Phase.SERVING
        app = create_app(self._llm, self._llm.model_names, ServerConfig(max_queue=_ANY_QUEUE), lifecycle, KeyRing())
        senders = [asyncio.ensure_future(self._send_all(app)) for _ in range(self._at_once)]
        together = asyncio.gather(*senders)
        try:
            await asyncio.wait((together, self._dead), return_when=asyncio.FIRST_COMPLETED)
            if self._dead.done():
                raise self._dead.exception() or AssertionError
            together.result()
        finally:
            self._dead.cancel()
            for sender in senders:
                sender.cancel()
            await asyncio.gather(together, *senders, return_exceptions=True)
        return Count(self._failed, self._postponed)

    def _on_death(self, error: EngineError) -> None:
        if not self._dead.done():
            self._dead.set_exception(error)

    async def _send_all(self, app: ASGIApp) -> None:
        """One of those who take the next request until none is left."""
        for request in self._left:
            await self._send(app, request)
            self._advance()

    async def _send(self, app: ASGIApp, request: BatchRequest) -> None:
        if request.error is not None:
            self._failed += 1
            self._results.add(request, None, {"code": request.error.code, "message": str(request.error)})
            return
        identity = uuid.uuid4().hex
        status, content = await _post(app, request.url, request.body, identity)
        if status == 503 or not self._llm.alive():
            self._postponed += 1
            return
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            self._failed += 1
            found = f"{request.url} answers with {status} and something else than JSON"
            return self._results.add(request, None, {"code": "not_json", "message": found})
        self._failed += status != 200
        self._results.add(request, {"status_code": status, "request_id": identity, "body": body}, None)


async def _post(app: ASGIApp, path: str, body: bytes, identity: str) -> tuple[int, bytes]:
    """(status, content) of a request to the application."""
    sent, gone = [False], asyncio.Event()
    status, content = 500, bytearray()

    async def receive() -> Message:
        if sent[0]:
            await gone.wait()  # who sends a batch does not leave
            return {"type": "http.disconnect"}
        sent[0] = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            content.extend(message.get("body", b""))

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", identity.encode()),
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    with contextlib.suppress(Exception):  # unforeseen: it is logged, and answered, and then raised for servers to see
        await app(scope, receive, send)
    return status, bytes(content)
