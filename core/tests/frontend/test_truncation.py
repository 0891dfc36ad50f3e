"""Prompts that are pooled and cut: the beginning stays, with what the tokenizer puts around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.input_processor import ALL_THAT_FITS, cut_to_last
from engine.types.errors import InvalidRequestError
from engine_kit.truncation import cut_to_first

IDS = st.lists(st.integers(10, 20), max_size=12)


@given(
    before=st.lists(st.just(1), max_size=2), inner=IDS, after=st.lists(st.just(2), max_size=2), most=st.integers(1, 20)
)
def test_the_first_with_what_stands_around(before: list[int], inner: list[int], after: list[int], most: int) -> None:
    ids, around = [*before, *inner, *after], len(before) + len(after)
    if len(ids) > most and most <= around:
        with pytest.raises(InvalidRequestError, match="none of it would be left"):
            cut_to_first(ids, most, lambda: inner)
        return
    found = cut_to_first(ids, most, lambda: inner)
    assert len(found) == min(len(ids), most)
    assert found == [*before, *inner[: len(found) - around], *after]


@given(ids=IDS, most=st.integers(1, 20))
def test_bare_ids(ids: list[int], most: int) -> None:
    assert cut_to_first(ids, most, None) == ids[:most]
    assert cut_to_last(ids, most, 99) == ids[-most:] == cut_to_last(ids, ALL_THAT_FITS, most)
    assert cut_to_last(ids, None, 1) == ids


def test_a_tokenizer_that_writes_into_the_text() -> None:
    with pytest.raises(InvalidRequestError, match="around a text"):
        cut_to_first([1, 2, 3], 2, lambda: [1, 3])
