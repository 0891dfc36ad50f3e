"""How a request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError

MAX_LOGPROBS = 64
"""The most alternatives per position that a request may ask for."""
MAX_STOP_STRINGS = 64
"""The most stop strings that a request may carry: each costs a search for every token."""
MAX_STOP_LENGTH = 1024
"""The most characters of a stop string: as many may have to be held back."""
MAX_STOP_TOKEN_IDS = 1024
"""The most stop token ids that a request may carry."""
MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, kw_only=True, dict=False, omit_defaults=True):
    """The sampling parameters of one request, in the names that users of vLLM and OpenAI know.

    Args:
        n: number of completions.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this; in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this times the most likely one; in [0, 1].
        presence_penalty: subtracted once from the logit of each token already in the output; in [-2, 2].
        frequency_penalty: subtracted per occurrence in the output; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; > 0.
        seed: of the request's random numbers; None lets the engine draw one.
        stop: strings at which the text ends; the string itself is cut unless `include_stop_str_in_output`.
        stop_token_ids: ids at which generation ends.
        ignore_eos: go on past the model's end-of-sequence ids.
        max_tokens: the most tokens to generate; None means until the model's length.
        min_tokens: no end of sequence, stop id or stop string before this many tokens.
        logprobs: None, or how many alternatives to report beside the chosen token at each position.
        detokenize: False leaves the text empty (then `stop` is refused).
        skip_special_tokens: leave special tokens out of the text.

    Raises (from `verify`): InvalidRequestError naming the parameter, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.top_k == -1:
            self.top_k = 0

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True where logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def verify(self) -> None:
        """Check types and ranges. Raises InvalidRequestError for the first parameter that is out of range."""
        _integer("n", self.n, 1, 128)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens}",
                f"max_tokens is {self.max_tokens}",
                "make min_tokens at most max_tokens",
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name}={getattr(self, name)!r}", "it is not a boolean", "pass true or false"
                )
        self._verify_stops()

    def _verify_stops(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            raise InvalidRequestError(f"stop={self.stop!r:.80}", "it is not a string or a list of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop={len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} are taken", "send fewer stop strings"
            )
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop=a string of {longest} characters", f"at most {MAX_STOP_LENGTH} are taken", "send a shorter one"
            )
        if any(not s for s in self.stop):
            raise InvalidRequestError("stop=''", "an empty stop string would end every request", "leave it out")
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings with detokenize=False", "no text is made to search", "use stop_token_ids"
            )
        if not isinstance(self.stop_token_ids, list):
            raise InvalidRequestError(f"stop_token_ids={self.stop_token_ids!r:.80}", "it is not a list of integers")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids={len(self.stop_token_ids)} ids",
                f"at most {MAX_STOP_TOKEN_IDS} are taken",
                "send fewer",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"{name}={value!r:.80}", "it is not an integer", f"pass an integer from {low} to {high}"
        )
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{name}={value}", f"it is outside {low}..{high}", f"pass a value from {low} to {high}"
        )


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidRequestError(f"{name}={value!r:.80}", "it is not a number", f"pass a number from {low} to {high}")
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(
            f"{name}={value}", f"it is outside {bracket}{low}, {high}]", "pass a value in that range"
        )
