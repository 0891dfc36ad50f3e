"""Prompts that are pooled and cut: the beginning stays, with what the tokenizer puts around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import BertProcessing

from engine.frontend.prompts import ALL_THAT_FITS, cut_pair, cut_to_first, cut_to_last
from engine.types.errors import InvalidRequestError

IDS = st.lists(st.integers(10, 20), max_size=12)


@given(
    before=st.lists(st.just(1), max_size=2), inner=IDS, after=st.lists(st.just(2), max_size=2), most=st.integers(1, 20)
)
def test_the_first_with_what_stands_around(before: list[int], inner: list[int], after: list[int], most: int) -> None:
    ids, around = [*before, *inner, *after], len(before) + len(after)
    if len(ids) > most and most <= around:
        with pytest.raises(InvalidRequestError, match="none of it would be left"):
            cut_to_first(ids, most, 99, lambda: inner)
        return
    found = cut_to_first(ids, most, 99, lambda: inner)
    assert len(found) == min(len(ids), most)
    assert found == [*before, *inner[: len(found) - around], *after]


@given(ids=IDS, most=st.integers(1, 20))
def test_bare_ids(ids: list[int], most: int) -> None:
    assert cut_to_first(ids, most, 99, None) == ids[:most] == cut_to_first(ids, ALL_THAT_FITS, most, None)
    assert cut_to_last(ids, most, 99) == ids[-most:] == cut_to_last(ids, ALL_THAT_FITS, most)
    assert cut_to_first(ids, None, 1, None) == cut_to_last(ids, None, 1) == ids


def test_a_tokenizer_that_writes_into_the_text() -> None:
    with pytest.raises(InvalidRequestError, match="around a text"):
        cut_to_first([1, 2, 3], 2, 9, lambda: [1, 3])


def pair_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"[CLS]": 0, "[SEP]": 1, **{f"w{i}": 2 + i for i in range(4)}}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    return tokenizer


WORDS = st.lists(st.sampled_from([f"w{i}" for i in range(4)]), max_size=9).map(" ".join)


@given(one=WORDS, two=WORDS, most=st.integers(4, 24))
def test_a_pair_is_cut_as_the_tokenizers_library_does(one: str, two: str, most: int) -> None:
    ours, theirs = pair_tokenizer(), pair_tokenizer()
    theirs.enable_truncation(most, strategy="longest_first")
    whole, expected = ours.encode(one, two), theirs.encode(one, two)
    alone = [ours.encode(text, add_special_tokens=False).ids for text in (one, two)]
    ids, start = cut_pair(whole.ids, alone[0], alone[1], whole.type_ids.index(1), most)
    assert ids == expected.ids and start == expected.type_ids.index(1)


def test_a_pair_of_which_nothing_would_be_left() -> None:
    with pytest.raises(InvalidRequestError, match="3 tokens around a pair"):
        cut_pair([0, 5, 6, 1, 7, 1], [5, 6], [7], 4, 3)
    with pytest.raises(InvalidRequestError, match="around the texts"):
        cut_pair([0, 5, 6, 1, 7, 1], [5, 9], [7], 4, 5)
