"""Stop strings against a plain oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_kit.stop_strings import StopMatch, StopScanner, StopStrings

ALPHABET = "ab"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)
PARTS = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def first_match(text: str, stops: list[str], armed_from: int = 0) -> tuple[int, str] | None:
    """(end, string) of the match that is complete first, the longest of several; by trying every place."""
    for end in range(1, len(text) + 1):
        if end > armed_from and (ending := [stop for stop in stops if text[:end].endswith(stop)]):
            return end, max(ending, key=len)
    return None


def may_begin(text: str, stops: list[str]) -> int:
    """The length of the longest end of the text that begins a stop string."""
    return max((k for k in range(len(text) + 1) if any(s.startswith(text[len(text) - k :]) for s in stops)), default=0)


@settings(max_examples=120, deadline=None)
@given(parts=PARTS, stops=STOPS)
def test_against_the_oracle(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    text, shown = "", ""
    for part in parts:
        text += part
        found = scanner.push(part)
        expected = first_match(text, stops)
        if isinstance(found, StopMatch):
            assert expected is not None
            end, stop = expected
            assert found.stop == stop
            assert shown + found.text == text[: end - len(stop)]
            return
        assert expected is None
        shown += found
        # All that can be shown is shown, and nothing that may become a stop string.
        assert shown == text[: len(text) - may_begin(text, stops)]
    assert shown + scanner.flush() == text


@settings(max_examples=120, deadline=None)
@given(parts=PARTS, stops=STOPS, unarmed=st.integers(0, 6))
def test_unarmed_matches_do_not_count(parts: list[str], stops: list[str], unarmed: int) -> None:
    scanner = StopScanner(StopStrings(stops))
    text, shown, armed_from = "", "", 0
    for place, part in enumerate(parts):
        text += part
        if place < unarmed:
            armed_from = len(text)
        found = scanner.push(part, armed=place >= unarmed)
        if isinstance(found, StopMatch):
            end, stop = first_match(text, stops, armed_from) or (0, "")
            assert found.stop == stop
            assert (shown + found.text == text[: end - len(stop)]) or len(shown) > end - len(stop)
            return
        assert first_match(text, stops, armed_from) is None
        shown += found
    assert shown + scanner.flush() == text


def test_many_long_stop_strings_cost_no_more() -> None:
    scanner = StopScanner(StopStrings(["a" * 500 + str(i) for i in range(64)]))
    shown = "".join(str(scanner.push("a")) for _ in range(2000))
    assert len(shown) == 1500
    assert scanner.flush() == "a" * 500
