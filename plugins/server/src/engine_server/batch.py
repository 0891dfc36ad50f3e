"""`engine run-batch`: the two files of a batch, in OpenAI's form, and how it runs: every request goes through the
server's own routes, in this process and without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Self

import orjson
from starlette.types import ASGIApp, Message

from engine.embedding import EngineConfig
from engine.plugin.hints import did_you_mean
from engine.types.errors import EngineError, InvalidRequestError
from engine_kit.async_llm import AsyncLLM
from engine_server.app import create_app
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle, Phase

_KEYS = ("custom_id", "method", "url", "body")
_HEAD = b'{"id":"batch_req_'
"""How every line of results begins: what else lies in a file is not ours to mend."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input.

    Attributes:
        number: of the line, from 1.
        custom_id: the user's name for it; None where the line could not be read so far.
        url: the route's path.
        body: of the request, as JSON.
        error: why it cannot be sent; None where it can.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: InvalidRequestError | None = None

    @property
    def key(self) -> str | int:
        """By which its result is found again: its name, or its place where it has none."""
        return self.number if self.custom_id is None else self.custom_id


def read_requests(data: bytes, path: str) -> list[BatchRequest]:
    """Every line that is not blank; one that cannot be read has an error, and the others go on.

    Raises InvalidRequestError where there is none, or two have one `custom_id`: their results could not be told apart.
    """
    requests: list[BatchRequest] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        request = _read(line, number)
        if request.custom_id is not None and (first := seen.setdefault(request.custom_id, number)) != number:
            raise InvalidRequestError(
                f"run the batch {path!r}",
                f"lines {first} and {number} have the custom_id {request.custom_id!r:.80}",
                "give every line one of its own",
            )
        requests.append(request)
    if not requests:
        raise InvalidRequestError(f"run the batch {path!r}", "it is empty", "write one request a line")
    return requests


def _read(line: bytes, number: int) -> BatchRequest:
    custom_id: str | None = None

    def bad(found: str, remedy: str = "") -> BatchRequest:
        return BatchRequest(number, custom_id, error=InvalidRequestError(f"line {number}", found, remedy))

    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return bad(f"it is not valid JSON: {error}", "write one JSON object a line")
    if not isinstance(content, dict):
        return bad(f"it is a JSON {type(content).__name__}, not an object", "write one object a line")
    given = content.get("custom_id")
    if not isinstance(given, str) or not given:
        return bad(f"custom_id={given!r:.80} is no text", "give every line a custom_id of its own")
    custom_id = given
    for key in content:
        if key not in _KEYS:
            return bad(f"there is no key {key!r:.80}", did_you_mean(key, _KEYS) or f"the keys are {', '.join(_KEYS)}")
    if content.get("method", "POST") != "POST":
        return bad(f"method={content['method']!r:.80} is not POST", "send what takes a body")
    url, body = content.get("url"), content.get("body")
    if not isinstance(url, str) or not url.startswith("/") or "?" in url:
        return bad(f"url={url!r:.80} is no path of this server", 'write a route, as "/v1/chat/completions"')
    if not isinstance(body, dict):
        return bad("body is no object" if "body" in content else "there is no body", "write the request's fields in it")
    if body.get("stream"):
        return bad("stream=true is not for batches: a result is one line", "leave it out")
    if body.get("background"):
        return bad("background=true is not for batches: who would get the response later?", "leave it out")
    return BatchRequest(number, custom_id, url, orjson.dumps(body))


class Results:
    """The file of results, made where there is none, which grows by whole lines. What is there already stays, and is
    not asked for again.

    A last line that is torn, as a process that was ended in mid-write leaves it, is taken away, and its request with it
    is to be done again.

    Attributes:
        done: the keys (see `BatchRequest.key`) of the requests whose results are there.
        failed: how many of these are errors.

    Raises:
        InvalidRequestError: it cannot be opened, another process writes to it, or something else than results lies in
            it; it is as it was then.
    """

    def __init__(self, path: str) -> None:
        self._asked = f"write the results {path!r}"
        self.done: set[str | int] = set()
        self.failed = 0
        try:
            self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise InvalidRequestError(self._asked, error.strerror or str(error), "check the path") from error
        try:
            self._lock()
            self._take()
        except BaseException:
            self._file.close()
            raise

    def add(self, request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        """Write one result. Raises InvalidRequestError where that fails, as on a full disk."""
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id}
        if request.custom_id is None:
            line["line"] = request.number  # type: ignore[assignment]
        data = orjson.dumps({**line, "response": response, "error": error}) + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as failure:
            remedy = "run the same command again once there is space: it goes on from here"
            raise InvalidRequestError(self._asked, failure.strerror or str(failure), remedy) from failure

    def close(self) -> None:
        """Have everything on disk. Idempotent."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # it could not be gone on with, or have no end
            raise InvalidRequestError(self._asked, "it is no file on a disk", "name one")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = "another process writes to it"
            raise InvalidRequestError(self._asked, found, "wait for it, or name another file") from error

    def _take(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        *lines, last = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line.strip() and not self._note(line):
                raise self._foreign(number)
        if not last:
            return
        if self._note(last):
            self._file.write(b"\n")
        elif last.startswith(_HEAD) or _HEAD.startswith(last):
            self._file.truncate(len(data) - len(last))
        else:
            raise self._foreign(len(lines) + 1)

    def _note(self, line: bytes) -> bool:
        """Take a line for done; False where it is no result."""
        try:
            content = orjson.loads(line)
        except orjson.JSONDecodeError:
            return False
        if not isinstance(content, dict) or not {"custom_id", "response", "error"} <= content.keys():
            return False
        custom_id = content["custom_id"]
        self.done.add(content.get("line", 0) if custom_id is None else custom_id)
        response = content["response"]
        self.failed += not isinstance(response, dict) or response.get("status_code") != 200
        return True

    def _foreign(self, number: int) -> InvalidRequestError:
        found = f"its line {number} is no result of a batch"
        return InvalidRequestError(self._asked, found, "name another file; this one is left as it is")


def left(requests: Sequence[BatchRequest], results: Results) -> list[BatchRequest]:
    """The requests whose results are not there."""
    return [request for request in requests if request.key not in results.done]


_ANY_QUEUE = 2**31 - 1
"""The batch itself limits how many requests wait."""
QUEUED_PER_PLACE = 2
"""Requests under way for each that can run: the next is there when one ends."""


class Tally(NamedTuple):
    """What became of the requests that were sent.

    Attributes:
        failed: with an error for a result.
        postponed: that the engine could not take now (503), so that there is no result: to be sent again.
    """

    failed: int
    postponed: int


def run_batch(
    config: EngineConfig, requests: Sequence[BatchRequest], results: Results, advance: Callable[[], Any]
) -> Tally:
    """Send every request, `QUEUED_PER_PLACE` for each place at once, to an engine that is started and shut down here.
    Results are written as they come; `advance` is called after each.

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
        self._left = iter(requests)
        self._failed = self._postponed = 0
        self._dead: asyncio.Future[Any]

    async def run(self) -> Tally:
        self._dead = asyncio.get_running_loop().create_future()
        await self._llm.start(self._on_death)
        lifecycle = Lifecycle()
        lifecycle.phase = Phase.SERVING
        app = create_app(self._llm, ServerConfig(max_queue=_ANY_QUEUE), lifecycle, KeyRing())
        places = self._llm.config.max_num_seqs * self._llm.config.data_parallel_size
        senders = [asyncio.ensure_future(self._send_all(app)) for _ in range(max(1, QUEUED_PER_PLACE * places))]
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
        return Tally(self._failed, self._postponed)

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
    sent, status, content = False, 500, bytearray()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # who sends a batch does not leave
        sent = True
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
