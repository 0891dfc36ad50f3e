"""An answer's bytes, cut anywhere, say the same; what is wrong with one is told."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bench.exchange import Exchange, Target, fault_of, read_outcome

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


TOKENS = [event(choices=[{"text": text}]) for text in ("Once", "", " upon\n\n")]
LAST = event(choices=[{"delta": {}, "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3})
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
WHOLE = [HEAD, *map(chunk, TOKENS), chunk(LAST), chunk(USAGE), END]


def exchange(pieces: list[bytes], fault: str = "") -> Exchange:
    """Piece i came i + 1 seconds after its time."""
    return Exchange(planned=100.0, pieces=[(101.0 + i, piece) for i, piece in enumerate(pieces)], fault=fault)


def test_an_answer_in_whole_pieces():
    outcome = read_outcome(exchange(WHOLE))
    assert outcome == ("", [2.0, 3.0, 4.0], 9, 3, None, "length")


@given(st.lists(st.integers(1, len(b"".join(WHOLE)) - 1), unique=True))
def test_an_answer_cut_anywhere(cuts):
    """An event's time is that of the piece that brought its last byte."""
    data = b"".join(WHOLE)
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    expected = []
    for token in TOKENS:
        last = data.index(token) + len(token)
        expected.append(1.0 + next(i for i, end in enumerate(bounds[1:]) if end >= last))
    assert read_outcome(exchange(pieces)) == ("", expected, 9, 3, None, "length")


def test_two_events_in_one_chunk_and_no_chunks_at_all():
    together = [HEAD, chunk(b"".join(TOKENS)), chunk(USAGE), END]
    assert read_outcome(exchange(together)) == ("", [2.0, 2.0, 2.0], 9, 3, None, "")
    plain = [b"HTTP/1.1 200 OK\r\n\r\n", *TOKENS, USAGE, b"data: [DONE]\n\n"]
    assert read_outcome(exchange(plain)) == ("", [2.0, 3.0, 4.0], 9, 3, None, "")


@pytest.mark.parametrize(
    ("pieces", "fault", "error"),
    [
        ([], "refused", "refused"),
        ([], "", "closed"),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}"], "", "http_503"),
        ([b"nonsense\r\n\r\n"], "", "http_0"),
        ([HEAD, chunk(TOKENS[0])], "", "closed"),
        ([HEAD, chunk(TOKENS[0])], "timeout", "timeout"),
        ([HEAD, chunk(TOKENS[0])[:-4]], "reset", "reset"),
        ([HEAD, chunk(event(error={"code": "engine_dead", "message": "x"})), END], "", "stream_engine_dead"),
        ([HEAD, chunk(event(error={"code": None, "type": "server error"})), END], "", "stream_server_error"),
        ([HEAD, chunk(b"data: {broken\n\n"), END], "", "bad_event"),
        ([HEAD, END], "", "no_tokens"),
    ],
)
def test_what_went_wrong(pieces, fault, error):
    assert read_outcome(exchange(pieces, fault)).error == error


def test_faults_have_words():
    import errno

    words = [fault_of(e) for e in (TimeoutError(), ConnectionRefusedError(), ConnectionResetError())]
    assert words == ["timeout", "refused", "reset"]
    assert fault_of(OSError(errno.EMFILE, "too many")) == "emfile"


def test_a_request_on_the_wire():
    target = Target("host", 8000, False, "/base", "key")
    head, _, body = target.encode("POST", "/v1/completions", {"a": 1}).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/v1/completions HTTP/1.1"
    assert {"Connection: close", f"Content-Length: {len(body)}", "Authorization: Bearer key"} <= set(lines)
    assert json.loads(body) == {"a": 1}
