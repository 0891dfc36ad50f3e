"""The two files of a batch, in OpenAI's form: requests, one a line, and their results, one a line."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import orjson

from engine.plugin.hints import did_you_mean
from engine.types.errors import InvalidRequestError

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
    """The file of results, which grows by whole lines. What is there already stays, and is not asked for again.

    A last line that is torn, as a process that was ended in mid-write leaves it, is taken away, and its request with it
    is to be done again.

    Args:
        path: of the file; made where there is none.

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
