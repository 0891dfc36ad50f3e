"""The files of a batch: every line is answered or refused, and what is written stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.types.errors import InvalidRequestError
from engine_server.batch import BatchRequest, Results, left, read_requests

GOOD = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'


def line(**changes: Any) -> bytes:
    return orjson.dumps({key: value for key, value in (orjson.loads(GOOD) | changes).items() if value != "leave out"})


def test_lines() -> None:
    good, other = read_requests(b"\xef\xbb\xbf" + GOOD + b"\r\n \n" + line(custom_id="b", method="leave out"), "in")
    assert (good.number, good.custom_id, good.url, orjson.loads(good.body)) == (
        1,
        "a",
        "/v1/completions",
        {"prompt": "x"},
    )
    assert (other.number, other.key, other.error) == (3, "b", None)


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (b"{", 1, "not valid JSON"),
        (b"[]", 1, "JSON list"),
        (b'{"custom_id": "\\ud800"}', 1, "not valid JSON"),
        (line(custom_id="leave out"), 1, "custom_id=None is no text"),
        (line(custom_id=7), 1, "custom_id=7 is no text"),
        (line(custom_id=""), 1, "is no text"),
        (line(methods="POST"), "a", "did you mean 'method'?"),
        (line(method="GET"), "a", "method='GET' is not POST"),
        (line(url="leave out"), "a", "url=None is no path"),
        (line(url="https://elsewhere/v1/completions"), "a", "is no path of this server"),
        (line(url="/v1/completions?x=1"), "a", "is no path of this server"),
        (line(body=[]), "a", "body is no object"),
        (line(body="leave out"), "a", "there is no body"),
        (line(body={"prompt": "x", "stream": True}), "a", "stream=true is not for batches"),
    ],
)
def test_a_line_that_cannot_be_sent(text: bytes, key: str | int, says: str) -> None:
    (request,) = read_requests(text, "in")
    assert request.key == key and request.error is not None and says in str(request.error)


def test_batches_that_are_refused() -> None:
    for text, says in ((b"\n  \n", "it is empty"), (GOOD + b"\n\n" + GOOD, "lines 1 and 3 have the custom_id 'a'")):
        with pytest.raises(InvalidRequestError, match=says):
            read_requests(text, "in")


def test_results_are_found_again_wherever_the_file_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "out"
    requests = [BatchRequest(1, "a"), BatchRequest(2), BatchRequest(3, "é")]
    with Results(str(path)) as results:
        assert left(requests, results) == requests
        results.add(requests[0], {"status_code": 200, "body": {}}, None)
        results.add(requests[1], None, {"code": "x", "message": "y"})
        results.add(requests[2], {"status_code": 400, "body": {}}, None)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 3
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Results(str(path)) as results:
            complete = sum(cut >= end - 1 for end in ends)  # a line without its end is whole all the same
            assert left(requests, results) == requests[complete:]
            assert results.failed == max(0, complete - 1)
            assert path.read_bytes() == whole[: ends[complete - 1] if complete else 0]


@pytest.mark.parametrize("text", [b"notes\n", b"notes", b'{"text": "x"}\n', b"\0\0", b"[]\n", GOOD])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(text)
    with pytest.raises(InvalidRequestError, match="line 1 is no result of a batch"):
        Results(str(path))
    assert path.read_bytes() == text


def test_one_writes_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with Results(path), pytest.raises(InvalidRequestError, match="another process writes to it"):
        Results(path)
    Results(path).close()
    with pytest.raises(InvalidRequestError, match="check the path"):
        Results(str(tmp_path / "none" / "out"))


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with Results(str(tmp_path / "out")) as results:
        whole = results._file
        results._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        with pytest.raises(InvalidRequestError, match=r"No space left.*same command again"):
            results.add(BatchRequest(1, "a"), None, {})
        results._file.close()
        results._file = whole
    for device in ("/dev/full", "/dev/zero"):
        with pytest.raises(InvalidRequestError, match="no file on a disk"):
            Results(device)
