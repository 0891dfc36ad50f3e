"""Pairs that are cut, as Hugging Face's tokenizers cut them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import BertProcessing

from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine_kit.scoring import cut_pair, plan_scores


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


def test_a_pair_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    def check_characters(count: int) -> None:
        raise PromptTooLongError(f"a prompt of {count} characters", "it is too long")

    pooler = SimpleNamespace(num_labels=1, tasks=("classify",), lower_case=False)
    described = SimpleNamespace(generates=False, pooler=pooler, architecture="Any")
    tokenizer = SimpleNamespace(encode_pair=lambda first, second: ([1], None))
    inputs: Any = SimpleNamespace(model=described, tokenizer=tokenizer, check_characters=check_characters)
    with pytest.raises(PromptTooLongError, match="a prompt of 49 characters"):
        plan_scores(inputs, ["a" * 9], ["a" * 40], PoolingParams())
    with pytest.raises(InvalidRequestError, match="a pair that is read as one prompt is two texts"):
        plan_scores(inputs, [[1, 2]], ["a"], PoolingParams())
    wrong: Any = SamplingParams()
    with pytest.raises(InvalidRequestError, match="score with SamplingParams"):
        plan_scores(inputs, ["a"], ["b"], wrong)
    with pytest.raises(InvalidRequestError, match="they contradict each other"):
        plan_scores(inputs, ["a"], ["b"], PoolingParams(task="embed"))
