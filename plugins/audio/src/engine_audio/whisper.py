"""What a served Whisper says of itself: the ids of its special tokens, and what its makers suppress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.interfaces.tokenizer import Tokenizer
from engine.types.model import ModelDescription
from engine_audio.card import Rules
from engine_audio.languages import LANGUAGES

STEP = 0.02
"""Seconds from one timestamp to the next."""
STEPS = 1500
"""Of a window of 30 s."""


@dataclass(frozen=True)
class Whisper:
    """One that is served.

    Args:
        bins: `num_mel_bins`.
        start, end, previous, no_timestamps: ids of <|startoftranscript|>, <|endoftext|>, <|startofprev|> and
            <|notimestamps|>; all below `end` are text, all above `no_timestamps` are timestamps.
        no_speech: of the token whose probability says that nobody speaks; None where there is none.
        languages: ids by code; empty for a model of English alone.
        tasks: ids by name, "transcribe" and "translate"; empty for a model of English alone.
        rules: of outputs with timestamps.
    """

    bins: int
    start: int
    end: int
    previous: int
    no_timestamps: int
    no_speech: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    rules: Rules

    def rules_for(self, timestamps: bool) -> dict[str, Any]:
        """What the logits processor is told: `SamplingParams.extra_args["whisper"]`."""
        if timestamps:
            rules = self.rules
        else:
            rules = Rules(suppress=self.rules.suppress, begin_suppress=self.rules.begin_suppress)
        told: dict[str, Any] = msgspec.to_builtins(rules)
        return told

    def beginning(self, language: str, task: str, timestamps: bool) -> list[int]:
        """The decoder's first ids."""
        ids = [self.start]
        if self.languages:
            ids += [self.languages[language], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]

    def text(self, ids: list[int]) -> list[int]:
        """Those that are text."""
        return [token for token in ids if token < self.end]


def whisper_of(tokenizer: Tokenizer, model: ModelDescription, generation: Mapping[str, Any]) -> Whisper | None:
    """None where the model is no Whisper, or its tokenizer has not the tokens of one.

    Args:
        generation: generation_config.json.
    """
    if model.encoder is None or not model.encoder.features:
        return None

    def found(name: str) -> int | None:
        ids = tokenizer.encode(f"<|{name}|>", False)
        return ids[0] if len(ids) == 1 and ids[0] < model.vocab_size else None

    several = generation.get("is_multilingual", True)
    languages = {code: token for code in LANGUAGES if several and (token := found(code)) is not None}
    tasks = {name: token for name in ("transcribe", "translate") if (token := found(name)) is not None}
    start, end, previous, no_timestamps = map(found, ("startoftranscript", "endoftext", "startofprev", "notimestamps"))
    if start is None or end is None or previous is None or no_timestamps is None or (languages and len(tasks) < 2):
        return None
    if no_timestamps + STEPS + 1 >= model.vocab_size:
        return None
    # It is called otherwise by the first checkpoints.
    no_speech = next((token for name in ("nospeech", "nocaptions") if (token := found(name)) is not None), None)
    return Whisper(
        bins=model.encoder.features,
        start=start,
        end=end,
        previous=previous,
        no_timestamps=no_timestamps,
        no_speech=no_speech,
        languages=languages,
        tasks=tasks if languages else {},
        rules=Rules(
            suppress=list(generation.get("suppress_tokens") or ()),
            begin_suppress=list(generation.get("begin_suppress_tokens") or ()),
            first_timestamp=no_timestamps + 1,
            end=end,
            max_initial=generation.get("max_initial_timestamp_index"),
        ),
    )
