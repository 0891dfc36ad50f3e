"""What requests ask of logits processors: accepted, completed, or refused with the parameter's name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from engine.frontend.input_processor import InputProcessor
from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams
from engine_kit.bad_words import bad_word_ids
from engine_reference.logits_processors.card import AllowedTokenIdsProcessor, BadWordsProcessor, LogitBiasProcessor


class Style(LogitsProcessorCard):
    """A stranger's."""

    extra_args = frozenset({"style", "strength"})
    host_tokens = True

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        assert params.extra_args is not None
        if params.extra_args.get("style") == "loud":
            raise InvalidRequestError("style=loud", "it is too loud")


@pytest.fixture
def inputs(doubles: ModuleType) -> InputProcessor:
    cards = (AllowedTokenIdsProcessor, BadWordsProcessor, LogitBiasProcessor, Style)
    return InputProcessor(doubles.CharTokenizer(), doubles.description(), 32, processors=cards)


def made(inputs: InputProcessor, **fields: Any) -> Any:
    return inputs.process("r", "hi", SamplingParams(**fields)).requests


def test_logit_bias(inputs: InputProcessor) -> None:
    (request,) = made(inputs, logit_bias={"17": 3, 4: -100.0})
    assert request.params.logit_bias == {17: 3, 4: -100.0}
    for bad in (
        {5: 100.5},
        {5: -101},
        {5: float("nan")},
        {5: "1"},
        {5: True},
        {"x": 1},
        {-1: 1},
        {1000: 1},
        [5],
        {"-3": 1},
    ):
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            made(inputs, logit_bias=bad)
    with pytest.raises(InvalidRequestError, match="4096"):
        made(inputs, logit_bias=dict.fromkeys(range(5000), 1.0))


def test_allowed_token_ids(inputs: InputProcessor) -> None:
    (request,) = made(inputs, allowed_token_ids=[1, 2])
    assert request.params.allowed_token_ids == [1, 2]
    for bad in ([], [1000], [-1], [1.5], "abc", [True]):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
            made(inputs, allowed_token_ids=bad)


def test_bad_words(inputs: InputProcessor) -> None:
    (request,) = made(inputs, bad_words=["a", " no"], bad_words_token_ids=[[7, 8]])
    # A space before a word is a token more here, so that form is left out, as in vLLM.
    assert request.params.bad_words_token_ids == [[7, 8], [97], [110, 111]]
    for bad in (["a", ""], [" "], "a", [3], ["a" * 33], ["a"] * 513, ["é" + chr(1200)]):
        with pytest.raises(InvalidRequestError, match="bad_words"):
            made(inputs, bad_words=bad)
    for bad in ([[]], [[1000]], [[-1]], [3], "a", [list(range(33))]):
        with pytest.raises(InvalidRequestError, match="bad_words"):
            made(inputs, bad_words_token_ids=bad)


WORDS = {"cat": [1], " cat": [2], "cats": [1, 3], " cats": [2, 3], "dog": [4], " dog": [4], "odd": [], " odd": [9]}
WORDS |= {"wolf": [5, 6], " wolf": [7]}


class WordTokenizer:
    """Knows whole words, with and without a space before them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return WORDS[text]


def test_words_are_meant_with_and_without_a_space() -> None:
    def ids(*words: str) -> list[list[int]]:
        return bad_word_ids(words, WordTokenizer())  # type: ignore[arg-type]

    assert ids("cat") == ids(" cat") == [[1], [2]]
    assert ids("cats", "dog") == [[1, 3], [2, 3], [4]]
    assert ids("wolf") == [[5, 6]]
    with pytest.raises(InvalidRequestError, match="no tokens"):
        ids("odd")


def test_extra_args_go_to_those_who_claim_them(inputs: InputProcessor) -> None:
    (request,) = made(inputs, extra_args={"style": "quiet"})
    assert request.params.extra_args == {"style": "quiet"} and request.host_tokens
    assert not made(inputs, extra_args={})[0].host_tokens
    with pytest.raises(InvalidRequestError, match=r"extra_args=\{'stile': .*did you mean 'style'"):
        made(inputs, extra_args={"stile": 1})
    with pytest.raises(InvalidRequestError, match="style=loud"):
        made(inputs, extra_args={"style": "loud"})
    for bad in ([1], {1: 2}, {"style": object()}):
        with pytest.raises(InvalidRequestError, match="extra_args"):
            made(inputs, extra_args=bad)


def test_what_nobody_serves_is_refused(doubles: ModuleType) -> None:
    inputs = InputProcessor(doubles.CharTokenizer(), doubles.description(), 32)
    for fields in (
        {"logit_bias": {1: 1.0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [1]},
        {"extra_args": {"a": 1}},
    ):
        with pytest.raises(InvalidRequestError, match="no logits processor at work"):
            made(inputs, **fields)
    made(inputs, logit_bias={}, extra_args={})


def test_something_must_be_left_to_draw(inputs: InputProcessor) -> None:
    for words in ([[97], [5, 98]], [[97, 98], [97, 97]], [[98, 97, 98], [97, 97]]):
        with pytest.raises(InvalidRequestError, match="no token to draw"):
            made(inputs, allowed_token_ids=[97, 98], bad_words_token_ids=words)
    for words in ([[97], [97]], [[97, 97], [98, 98]], [[98, 97, 98], [98, 97, 97, 97]], [[97, 98], [98, 97, 98]]):
        made(inputs, allowed_token_ids=[97, 98], bad_words_token_ids=words)
    with pytest.raises(InvalidRequestError, match="no token to draw"):
        made(inputs, allowed_token_ids=[0, 5], stop_token_ids=[5], min_tokens=1)
    made(inputs, allowed_token_ids=[0, 5], stop_token_ids=[5])
    made(inputs, allowed_token_ids=[0, 97], min_tokens=1)
    made(inputs, allowed_token_ids=[0], min_tokens=1, ignore_eos=True)


def test_best_of_and_prompt_logprobs(inputs: InputProcessor) -> None:
    first, second, third = made(inputs, n=2, best_of=3, seed=10, prompt_logprobs=3)
    assert [r.request_id for r in (first, second, third)] == ["r#0", "r#1", "r#2"]
    assert {r.parent for r in (first, second, third)} == {"r"}
    assert [r.params.seed for r in (first, second, third)] == [10, 11, 12]
    assert all(r.params.logprobs == 0 and r.params.best_of is None and r.params.n == 1 for r in (first, second, third))
    assert [r.params.prompt_logprobs for r in (first, second, third)] == [3, None, None], "one scores for all"
    assert made(inputs, n=2, best_of=2)[0].params.logprobs is None
    assert made(inputs, best_of=2, logprobs=4)[1].params.logprobs == 4
    for bad in (1, 0, 129, True, "2"):
        with pytest.raises(InvalidRequestError, match="best_of"):
            made(inputs, n=2, best_of=bad)
    for bad in (-1, 65, 1.0):
        with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
            made(inputs, prompt_logprobs=bad)
