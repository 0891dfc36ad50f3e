"""Who jumps, over what, and how it is spelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.types.errors import EngineError
from engine_kit.jump_forward import LEAST, MOST, JumpForward

PIECES: list[bytes | None] = [*(bytes([byte]) for byte in range(128)), b"name", b"_of", b'{"', b"\xc3", b"\xa9", None]
NAME, OF, BRACE, HALF, OTHER_HALF = range(128, 133)
PROMPT = 3


def encode(text: str) -> list[int]:
    """The longest piece first, with a mark in front, as some tokenizers have."""
    ids, left = [ord(" ")], text.encode()
    while left:
        fitting = [i for i, piece in enumerate(PIECES) if piece and left.startswith(piece)]
        if not fitting:
            raise EngineError("encode", "no piece")
        ids.append(max(fitting, key=lambda i: len(PIECES[i] or b"")))
        left = left[len(PIECES[ids[-1]] or b"") :]
    return ids


class Table:
    """A request that decodes, in slot 0: known outputs, forced bytes."""

    def __init__(self, outputs: list[int], forced: bytes, ahead: int = 0, limit: int = 100, root: bytes = b"") -> None:
        known = PROMPT + len(outputs)
        self.tokens = np.zeros((1, 120), np.int32)
        self.tokens[0, PROMPT:known] = outputs
        self.prompt = np.array([PROMPT])
        self.known = np.array([known])
        self.placed = self.known + ahead
        self.limit = np.array([limit])
        self.order = np.array([1])
        self.matched = np.array([True])
        matcher = SimpleNamespace(forced_bytes=lambda: forced)
        self._request = SimpleNamespace(host_tokens=False, matcher=matcher, root=root)

    def request(self, slot: int) -> Any:
        return self._request


def jump(jumps: JumpForward, table: Table, room: int = 1000) -> list[int]:
    return jumps.choose(np.array([0], np.int32), table, room).get(0, [])  # type: ignore[arg-type]


def make() -> JumpForward:
    return JumpForward(1, lambda: PIECES, encode)


def test_it_is_spelled_as_by_the_tokenizer() -> None:
    assert jump(make(), Table([], b'{"name_of')) == [BRACE, NAME, OF]
    assert jump(make(), Table([ord("x"), BRACE], b'name_of"')) == [NAME, OF, ord('"')]


def test_where_the_tokenizer_would_have_cut_otherwise_nothing_is_known() -> None:
    assert jump(make(), Table([ord("n"), ord("a")], b"me_of_it")) == []
    assert jump(make(), Table([HALF], b"\xa9abc")) == [OTHER_HALF, *b"abc"]
    assert jump(make(), Table([], b"\xa9abc")) == [], "half a character is no text"


def test_the_first_token_may_be_under_way() -> None:
    assert jump(make(), Table([], b'{"name_of"', ahead=1)) == [NAME, OF, ord('"')]
    assert jump(make(), Table([], b'{"name', ahead=1)) == [], "one token is not worth it"
    assert jump(make(), Table([], b'{"name', ahead=2)) == []


@pytest.mark.parametrize(
    ("limit", "room", "most"), [(100, 1000, MOST), (PROMPT + 6, 1000, 5), (100, 4, 4), (100, 1, 0)]
)
def test_bounds(limit: int, room: int, most: int) -> None:
    assert len(jump(make(), Table([], b"x" * 50, limit=limit), room)) == most and LEAST > 1


def test_it_learns_how_the_model_spells() -> None:
    jumps, spelled = make(), [ord("{"), ord('"'), *b"na", ord("m"), ord("e"), OF]
    text = b"".join(PIECES[token] or b"" for token in spelled)
    for done in range(len(spelled) + 1):
        rest = b"".join(PIECES[token] or b"" for token in spelled[done:])
        jump(jumps, Table(spelled[:done], rest))
    jumps.enter(0)
    for done in range(len(spelled) - 1):
        rest = b"".join(PIECES[token] or b"" for token in spelled[done:])
        assert jump(jumps, Table([ord("x")], rest)) == spelled[done:]
    assert jump(jumps, Table([], text, ahead=1)) == spelled[1:]


def test_a_token_that_goes_on_behind_what_is_forced_is_not_learned() -> None:
    jumps = make()
    jump(jumps, Table([], b"xyna"))
    jump(jumps, Table([*b"xy", NAME], b""))
    assert jump(jumps, Table([], b"xyna")) == [*b"xy"]


def test_what_a_request_that_ended_wrote_is_how_it_begins() -> None:
    jumps = make()
    jump(jumps, Table([], b"xyname"))
    jumps.leave(0, Table([*b"xyna", len(PIECES) - 1], b""))  # type: ignore[arg-type]
    jumps.enter(0)
    assert jump(jumps, Table([], b"xyname")) == [*b"xyna"]


def test_what_was_learned_of_one_key_is_not_used_for_another() -> None:
    """Else the number of steps, and so the time, would tell what the other has been made to write."""
    jumps, forced, calls = make(), b"xyname_of", []
    jumps._encode = lambda text: calls.append(text) or encode(text)  # type: ignore[func-returns-value]
    by_tokenizer = jump(make(), Table([], forced))
    jump(jumps, Table([], forced, root=b"one"))
    jumps.leave(0, Table([*forced], b"", root=b"one"))  # type: ignore[arg-type]
    assert len(calls) == 1
    for root, spelled in ((b"one", [*forced]), (b"two", by_tokenizer)):
        jumps.enter(0)
        assert jump(jumps, Table([], forced, root=root)) == spelled
    assert len(calls) == 2, "nor does the time of looking it up tell"


def test_a_tokenizer_that_raises_costs_the_jump_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError("no rule for this")

    assert jump(JumpForward(1, lambda: PIECES, broken), Table([], b'{"name_of')) == []
    assert "no rule for this" in caplog.text


def test_who_waits_for_the_host_does_not_jump() -> None:
    table = Table([], b'{"name_of')
    table.request(0).host_tokens = True
    assert jump(make(), table) == []


def test_what_fails_is_given_up_for_a_while() -> None:
    jumps = make()
    for _ in range(2):
        tokens = jump(jumps, Table([], b'{"name_of'))
        one = np.array([len(tokens)])
        jumps.learned.learn(np.array([0]), np.array([PROMPT + 1]), one, np.array([0]))
    assert jump(jumps, Table([], b'{"name_of')) == []
    jumps.enter(0)
    assert jump(jumps, Table([], b'{"name_of'))
