"""Beam search: what a user asks, and what comes back. The names are vLLM's (`vllm/beam_search.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.types.checks import MAX_INT, check_flags, check_number, check_ranges
from engine.types.errors import InvalidRequestError, shown
from engine.types.outputs import Logprob
from engine.types.params import MAX_LOGPROBS

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Each beam is asked for twice as many candidates as there are beams."""


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How `LLM.beam_search` searches.

    Args:
        beam_width: beams that are kept, and sequences that are returned; at most `MAX_BEAM_WIDTH`.
        max_tokens: the most tokens to generate.
        ignore_eos: an end-of-sequence id is a token as any other.
        temperature: 0 or 1, which mean the same: beams are ranked by the model's own probabilities. (vLLM takes other
            values and ranks alike.)
        length_penalty: sequences are ranked by the sum of their log probabilities divided by their length to this
            power: above 0 longer ones gain. As in transformers the length is that of the generated tokens, the end of
            sequence included; vLLM counts the prompt's too, and the end not.
        include_stop_str_in_output: keep the end-of-sequence id among the tokens and in the text.

    Raises (from `verify`): InvalidRequestError.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def verify(self) -> None:
        """Check types and ranges."""
        check_ranges(self, {"beam_width": (1, MAX_BEAM_WIDTH), "max_tokens": (1, MAX_INT)})
        check_flags(self, "ignore_eos", "include_stop_str_in_output")
        if self.temperature not in (0, 1):
            raise InvalidRequestError(
                f"temperature={shown(self.temperature)}",
                "beams are ranked by the model's own probabilities, a temperature would change nothing",
                "leave it at 0 or 1",
            )
        check_number("length_penalty", self.length_penalty, -100.0, 100.0)


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam.

    Args:
        tokens: the prompt's ids, then the generated ones.
        logprobs: for each generated position the candidates that were looked at, from id to `Logprob`.
        cum_logprob: sum over the generated tokens, the end-of-sequence id included.
        text: of all its tokens, prompt and output, as in vLLM.
        finish_reason: "stop" at the end of sequence, else "length".
        stop_reason: the end-of-sequence id.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]
