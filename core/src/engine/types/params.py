"""How a request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.checks import (
    MAX_INT,
    Range,
    check_count,
    check_flags,
    check_ids,
    check_integer,
    check_number,
    check_ranges,
    check_texts,
    check_travels,
    invalid,
)
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 64
"""The most alternatives per position that a request may ask for."""
MAX_STOP_STRINGS = 64
"""The most stop strings that a request may carry: each costs a search for every token."""
MAX_STOP_LENGTH = 1024
"""The most characters of a stop string: as many may have to be held back."""
MAX_STOP_TOKEN_IDS = 1024
"""The most stop token ids that a request may carry."""
MAX_LOGIT_BIAS = 4096
"""The most ids that `logit_bias` may name: every slot keeps a table as wide as the widest."""
MAX_ALLOWED_TOKEN_IDS = 2**18
"""The most allowed token ids of a request: as many as the largest vocabularies have."""
MAX_BAD_WORDS = 512
"""The most entries of `bad_words`; each may have two forms in token ids."""
MAX_BAD_WORD_LENGTH = 256
"""The most characters of one bad word."""
MAX_BAD_WORD_TOKENS = 32
"""The most tokens of one bad word."""
MAX_THINKING_MARK = 16
"""The most token ids that begin thoughts, and that end them."""
MAX_SEED = 2**64 - 1

_RANGES: dict[str, Range] = {
    "n": (1, 128),
    "best_of": (1, 128),
    "temperature": (0.0, 1e4),
    "top_k": (0, MAX_INT),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(2**63), MAX_SEED),
    "max_tokens": (0, MAX_INT),
    "min_tokens": (0, MAX_INT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_OPTIONAL = frozenset({"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"})


class ThinkingBudget(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Thoughts that have not ended by themselves are ended.

    Args:
        tokens: where so many tokens of the output are there, and thoughts have begun and not ended, the next are `end`.
        end: token ids that end thoughts, as those of "</think>" do.
        begin: ids with which thoughts begin; []: the prompt has begun them.

    Raises (from `verify`): InvalidRequestError.
    """

    tokens: int
    end: list[int]
    begin: list[int] = []

    def verify(self) -> None:
        """Check types and ranges."""
        check_integer("thinking_budget.tokens", self.tokens)
        check_ids("thinking_budget.end", self.end, MAX_THINKING_MARK, least=1)
        check_ids("thinking_budget.begin", self.begin, MAX_THINKING_MARK)


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
        max_tokens: the most tokens to generate; None means until the model's length. 0 only has the prompt's KV cache
            where it is wanted next: it is found, loaded by connectors, or computed.
        min_tokens: no end of sequence, stop id or stop string before this many tokens.
        logprobs: None, or how many alternatives to report beside the chosen token at each position.
        detokenize: False leaves the text empty (then `stop` is refused).
        skip_special_tokens: leave special tokens out of the text.
        best_of: None, or how many completions to make, at least `n`: the n with the largest `cumulative_logprob` are
            returned, best first. All of them are computed and counted. They cannot be streamed.
        prompt_logprobs: None, or how many alternatives to report for each prompt token (0: its own log probability
            alone). The prompt is then computed whole: it takes nothing from the prefix cache, as in vLLM.
        logit_bias: token id to a number in [-100, 100] that is added to its logit; ids may be written as strings.
        bad_words: texts that must not be written. A word of several tokens is forbidden by forbidding its last token
            wherever the output ends in the others; each word is meant with and without a space before it (vLLM's rule).
        bad_words_token_ids: the same in token ids, taken as they are. The frontend adds the ids of `bad_words` to them.
        allowed_token_ids: None, or the only ids that may be drawn.
        extra_args: arguments of logits processors, by the key that the processor claims.
        thinking_budget: None, or how long the model may think before it answers.
        structured_outputs: None, or a constraint on the output. Where it is complete the request ends, whatever
            `min_tokens` says.

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
    best_of: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    thinking_budget: ThinkingBudget | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.top_k == -1:
            self.top_k = 0
        if self.bad_words is None:
            self.bad_words = []
        if isinstance(self.logit_bias, dict) and any(isinstance(token, str) for token in self.logit_bias):
            # As in JSON, where keys are strings.
            self.logit_bias = {_id_of(token): bias for token, bias in self.logit_bias.items()}

    @property
    def num_sequences(self) -> int:
        """How many completions are computed: `best_of`, or n."""
        return self.n if self.best_of is None else self.best_of

    def verify(self) -> None:
        """Check types and ranges. Raises InvalidRequestError for the first parameter that is out of range."""
        check_ranges(self, _RANGES, _OPTIONAL)
        for name, high in (("top_p", 1.0), ("repetition_penalty", 1e4)):
            check_number(name, getattr(self, name), 0.0, high, open_low=True)
        check_flags(self, "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"max_tokens is {self.max_tokens}", "pass at most as many")
        if self.best_of is not None and self.best_of < self.n:
            raise invalid("best_of", self.best_of, f"n is {self.n}", "make best_of at least n")
        self._verify_stops()
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise invalid("logit_bias", self.logit_bias, "it is not a mapping", "pass {token id: -100 to 100}")
            check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "ids", "name fewer ids")
            for token, bias in self.logit_bias.items():
                check_integer("logit_bias", token)
                check_number("logit_bias", bias, -100.0, 100.0)
        self.verify_bad_words()
        if self.allowed_token_ids is not None:
            if self.allowed_token_ids == []:
                raise invalid("allowed_token_ids", [], "no token could be drawn", "leave it out to allow all")
            remedy = "name each id once, or use structured_outputs"
            check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, remedy=remedy)
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict) or not all(isinstance(key, str) for key in self.extra_args):
                raise invalid("extra_args", self.extra_args, "it is not a mapping from names to values")
            check_travels("extra_args", self.extra_args)
        self._verify_structures()

    def _verify_stops(self) -> None:
        check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if not all(self.stop):
            raise invalid("stop", "", "an empty stop string would end every request", "leave it out")
        if self.stop and not self.detokenize:
            raise invalid("stop", self.stop, "detokenize=False makes no text to search", "use stop_token_ids")
        check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)

    def verify_bad_words(self) -> None:
        """The part of `verify` that is about them, in text and in token ids."""
        check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        if not all(word.strip() for word in self.bad_words):
            raise invalid("bad_words", [""], "a word without characters forbids nothing", "leave it out")
        if not isinstance(self.bad_words_token_ids, list):
            raise invalid("bad_words_token_ids", self.bad_words_token_ids, "it is not a list")
        for ids in self.bad_words_token_ids:
            check_ids("bad_words_token_ids", ids, MAX_BAD_WORD_TOKENS, least=1)
        check_count("bad_words_token_ids", len(self.bad_words_token_ids), 2 * MAX_BAD_WORDS, "words")

    def _verify_structures(self) -> None:
        if (budget := self.thinking_budget) is not None:
            if not isinstance(budget, ThinkingBudget):
                raise invalid("thinking_budget", budget, "it is no ThinkingBudget", "pass ThinkingBudget(tokens=...)")
            budget.verify()
        if (outputs := self.structured_outputs) is None:
            return
        if not isinstance(outputs, StructuredOutputsParams):
            remedy = "pass StructuredOutputsParams(choice=[...])"
            raise invalid("structured_outputs", outputs, "it is no StructuredOutputsParams", remedy)
        try:
            outputs.verify()
        except InvalidRequestError as error:
            raise outputs.renamed(error) from error


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that a model's makers, or who runs the engine, have chosen in place of the neutral ones.

    Args:
        params: by their names in `SamplingParams`; those that are not here are neutral.
        max_tokens_limit: no request of the server gets more tokens, whatever it asks for; None: no such limit.
        source: who chose them, for people.
    """

    params: dict[str, int | float] = msgspec.field(default_factory=dict)
    max_tokens_limit: int | None = None
    source: str = ""

    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that says nothing; new ones at each call."""
        return SamplingParams(**self.params)  # type: ignore[arg-type]


def _id_of(token: Any) -> Any:
    """A token id that was written as a string; anything else as it came, for `verify` to refuse."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 12 else token
