"""The cards of the processors that honour fields of `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.types.params import SamplingParams


class AllowedTokenIdsProcessor(LogitsProcessorCard):
    """No token but the allowed ones is drawn."""

    framework = "torch"
    parameters = frozenset({"allowed_token_ids"})
    body = "engine_reference.logits_processors.processors:AllowedTokenIdsBody"

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        _within("allowed_token_ids", params.allowed_token_ids or (), vocab_size)


class BadWordsProcessor(LogitsProcessorCard):
    """A word's last token is not drawn where the output ends in its other tokens."""

    framework = "torch"
    parameters = frozenset({"bad_words"})
    body = "engine_reference.logits_processors.processors:BadWordsBody"

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        for ids in params.bad_words_token_ids:
            _within("bad_words", ids, vocab_size)

    @classmethod
    def used_by(cls, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)


class LogitBiasProcessor(LogitsProcessorCard):
    """Numbers are added to the logits of some tokens."""

    framework = "torch"
    parameters = frozenset({"logit_bias"})
    body = "engine_reference.logits_processors.processors:LogitBiasBody"

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        _within("logit_bias", params.logit_bias or (), vocab_size)


class ThinkingBudgetProcessor(LogitsProcessorCard):
    """Thoughts that are longer than their budget are ended."""

    framework = "torch"
    parameters = frozenset({"thinking_budget"})
    body = "engine_reference.logits_processors.processors:ThinkingBudgetBody"

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        if params.thinking_budget is not None:
            _within("thinking_budget", (*params.thinking_budget.end, *params.thinking_budget.begin), vocab_size)


def _within(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"{name}={token}",
                f"the model's vocabulary ends at {vocab_size - 1}",
                "pass ids of this model's tokenizer",
            )
