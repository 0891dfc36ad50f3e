"""The card of the logits processor `whisper`, and what a request tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.types.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    from engine.types.params import SamplingParams

KEY = "whisper"
"""Of `SamplingParams.extra_args`."""


class Rules(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What Whisper may not write, by ids of its tokenizer.

    Args:
        suppress: never; `begin_suppress`: not as the first token of the output.
        first_timestamp: the id of `<|0.00|>`, before which stands `<|notimestamps|>`, and behind which all ids are
            timestamps. With it the output has timestamps: it begins with one, they do not decrease, and stand in pairs
            (one ends a segment, the next begins one) but before the end; and where all together are likelier than the
            likeliest text, one of them is next. None: none of these rules.
        end: the id of `<|endoftext|>`; all below it are text. Needed with `first_timestamp`.
        max_initial: the output's first timestamp is at most this many steps (of 20 ms) from the beginning.
    """

    suppress: list[int] = []
    begin_suppress: list[int] = []
    first_timestamp: int | None = None
    end: int | None = None
    max_initial: int | None = None


class WhisperRules(LogitsProcessorCard):
    """Tokens that Whisper's makers suppress, and where it may write timestamps (Radford et al. 2022)."""

    framework = "torch"
    extra_args = frozenset({KEY})
    body = "engine_audio.rules:WhisperRulesBody"

    @classmethod
    def verify(cls, params: SamplingParams, vocab_size: int) -> None:
        given = (params.extra_args or {})[KEY]
        asked, remedy = f"{KEY}={shown(given)}", "pass the fields of engine_audio.card.Rules"
        rules = read(given)
        if rules.first_timestamp is not None and not 0 < (rules.end or 0) < rules.first_timestamp:
            raise InvalidRequestError(asked, "first_timestamp needs an end before it, above 0", remedy)
        if rules.max_initial is not None and rules.max_initial < 0:
            raise InvalidRequestError(asked, "max_initial is negative", remedy)
        one = [] if rules.first_timestamp is None else [rules.first_timestamp]
        for token in (*rules.suppress, *rules.begin_suppress, *one):
            if not 0 <= token < vocab_size:
                found = f"it holds the id {token}, the model's vocabulary ends at {vocab_size - 1}"
                raise InvalidRequestError(asked, found, "pass ids of this model's tokenizer")


def read(given: Any) -> Rules:
    """Raises InvalidRequestError where it is no `Rules`."""
    try:
        return msgspec.convert(given, Rules)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"{KEY}={shown(given)}", str(error), "pass the fields of engine_audio.card.Rules"
        ) from error
