"""A constraint that begins later hears of exactly what comes after its start, however the tokens are handed over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from masking import driver_of

from engine.scheduling.matchers import RequestMatcher


class Recorder:
    """Allows everything but 9."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token == 9:
                return count
            self.heard.append(token)
        return len(tokens)

    @property
    def finished(self) -> bool:
        return True


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    start=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_what_it_hears(tokens: list[int], start: list[int], cuts: list[int]) -> None:
    inner = Recorder()
    matcher = RequestMatcher(inner, driver_of(None), start)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, end in pairwise(bounds):
        assert matcher.accept(tokens[begin:end]) == end - begin
    begins = [i + len(start) for i in range(len(tokens)) if tokens[i : i + len(start)] == start]
    assert matcher.started == matcher.finished == bool(begins)
    assert inner.heard == (tokens[begins[0] :] if begins else [])


def test_what_is_refused_behind_the_start() -> None:
    matcher = RequestMatcher(Recorder(), driver_of(None), [5])
    assert matcher.accept([9, 5, 1, 9, 1]) == 3
