"""Several grammar drivers in turn: who takes a constraint, and whose masks are whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cores import candidate

from engine.interfaces.grammar import GrammarCard, Matcher
from engine.scheduling.matchers import DraftedRow, GrammarDriver, draft_masks, fill_masks
from engine.scheduling.structured import Constraints, warm_up
from engine.types.errors import EngineError, InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams


class Told:
    """A matcher that says what it was told."""

    finished = False

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.heard = 0

    def accept(self, tokens: Sequence[int]) -> int:
        self.heard += len(tokens)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        self.heard -= num_tokens


class Scripted:
    """A driver that refuses by text, and writes its bit into masks."""

    def __init__(self, bit: int, refuses: str = "", error: type[EngineError] = InvalidRequestError) -> None:
        self.bit = bit
        self.refuses = refuses
        self.error = error
        self.compiled: list[str] = []
        self.calls = 0
        self.closed = 0

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        text = str(getattr(constraint, constraint.kinds[0]))
        self.compiled.append(text)
        if self.refuses and self.refuses in text:
            raise self.error(constraint.asked, f"driver {self.bit} has no {self.refuses}", f"ask {self.bit} for less")
        return Told(self.bit)  # type: ignore[return-value]

    def fill_masks(self, matchers: Sequence[Any], rows: np.ndarray, out: np.ndarray) -> None:
        self.calls += len(rows) > 0 and len(out) > 1  # the mask of a beginning is looked at alone
        assert all(matcher.bit == self.bit for matcher in matchers)
        out[rows] = self.bit

    def close(self) -> None:
        self.closed += 1


class Picky(GrammarCard):
    constraints = frozenset({"regex", "json"})

    @classmethod
    def verify(cls, constraint: StructuredOutputsParams) -> None:
        if "verified" in str(constraint.regex):
            raise InvalidRequestError(constraint.asked, "the card says no")


def constraints(*drivers: Scripted) -> Constraints:
    made = [GrammarDriver(candidate("grammar", f"d{driver.bit}"), Picky, driver) for driver in drivers]
    return Constraints({"regex": made, "json": made[1:]}, 32)


def test_each_goes_to_the_first_that_takes_it() -> None:
    first, second = Scripted(1, refuses="x"), Scripted(2)
    both = constraints(first, second)
    matchers = [both.compile(StructuredOutputsParams(regex=text), ()) for text in ("a", "x", "b", "xy")]
    matchers.append(both.compile(StructuredOutputsParams(json={}), ()))
    out, rows = np.zeros((7, 1), np.int32), np.array([6, 0, 2, 3, 5], np.int32)
    fill_masks(matchers, rows, out)
    assert out[:, 0].tolist() == [2, 0, 1, 2, 0, 2, 1]
    assert (first.calls, second.calls) == (1, 1)
    fill_masks(matchers[:1], rows[4:], out)
    assert out[5, 0] == 1 and second.calls == 1
    fill_masks([], rows[:0], out)
    assert matchers[1].accept([4, 5]) == 2 and not matchers[1].finished
    assert matchers[1].matcher.heard == 2  # type: ignore[attr-defined]


def test_who_refused_once_is_not_asked_again() -> None:
    first, second = Scripted(1, refuses="x"), Scripted(2)
    both = constraints(first, second)
    for _ in range(3):
        both.compile(StructuredOutputsParams(regex="x"), ())
    assert first.compiled == ["x"] and second.compiled == ["x"] * 3


def test_the_card_is_asked_before_anything_is_compiled() -> None:
    driver = Scripted(1)
    with pytest.raises(InvalidRequestError, match="the card says no"):
        constraints(driver).compile(StructuredOutputsParams(regex="verified"), ())
    assert not driver.compiled


def test_the_error_names_each_and_its_reason() -> None:
    both = constraints(Scripted(1, refuses="x"), Scripted(2, refuses="x"))
    with pytest.raises(InvalidRequestError) as caught:
        both.compile(StructuredOutputsParams(regex="x"), ())
    assert caught.value.asked == "structured_outputs.regex='x'"
    assert caught.value.found == "no grammar driver takes it: 'd1': driver 1 has no x; 'd2': driver 2 has no x"
    assert caught.value.remedy == "ask 1 for less"
    with pytest.raises(InvalidRequestError, match="no grammar driver at work"):
        both.compile(StructuredOutputsParams(choice=["a"]), ())


def test_a_driver_that_fails_is_no_refusal() -> None:
    second = Scripted(2)
    with pytest.raises(EngineError, match="driver 1 has no x"):
        constraints(Scripted(1, refuses="x", error=EngineError), second).compile(StructuredOutputsParams(regex="x"), ())
    assert not second.compiled


def test_one_reason_is_told_once() -> None:
    """A schema that is malformed is so to each."""
    both = constraints(Scripted(1, refuses="x"), Scripted(1, refuses="x"))
    with pytest.raises(InvalidRequestError) as caught:
        both.compile(StructuredOutputsParams(regex="x"), ())
    assert caught.value.found == "driver 1 has no x"


def test_where_nothing_can_begin_the_next_is_asked() -> None:
    """As under the grammar `root ::= root`: a mask would be empty."""
    both = constraints(Scripted(0), Scripted(2))
    assert both.compile(StructuredOutputsParams(regex="a"), ()).matcher.bit == 2  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="nothing can be written under it"):
        constraints(Scripted(0)).compile(StructuredOutputsParams(regex="a"), ())


def test_warming_up_passes_over_what_fails() -> None:
    drivers = [Scripted(1, refuses="a", error=EngineError), Scripted(2)]
    warm_up([GrammarDriver(candidate("grammar", f"d{driver.bit}"), Picky, driver) for driver in drivers], (3,))
    assert [driver.compiled for driver in drivers] == [["a"], ["a"]]


def test_each_driver_is_closed_once() -> None:
    drivers = [Scripted(0), Scripted(1)]
    constraints(*drivers).shutdown()
    assert [driver.closed for driver in drivers] == [1, 1]


def test_a_matcher_that_has_failed_says_so_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its request has heard of it everything is allowed; its driver is not asked again."""
    calls = []

    def accept(self: Told, tokens: Sequence[int]) -> int:
        calls.append(list(tokens))
        raise InvalidRequestError("go on", "it is too hard")

    both = constraints(Scripted(1), Scripted(2))
    matcher = both.compile(StructuredOutputsParams(regex="a"), ())
    assert matcher.accept([]) == 0
    monkeypatch.setattr(Told, "accept", accept)
    counts, bits = draft_masks([DraftedRow(matcher, [0, 1], frozenset())], 1)
    assert counts.tolist() == [1] and bits.tolist() == [[1]]
    for tokens in ([], [3]):
        with pytest.raises(InvalidRequestError, match="too hard"):
            matcher.accept(tokens)
    bits, other = np.zeros((2, 1), np.int32), both.compile(StructuredOutputsParams(regex="b"), ())
    fill_masks([matcher, other], np.array([1, 0], np.int32), bits)
    assert calls == [[0]] and bits.tolist() == [[1], [-1]]
