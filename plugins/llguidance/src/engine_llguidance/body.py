"""The body of grammar `llguidance`.

It compiles in the engine core's own process: the library lets go of the interpreter's lock meanwhile, counts what it
does, and gives up at limits of its own, after a second or two and some 10 MiB. What it puts off until a text is
written is under limits too: a request that hits one ends with an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.types.errors import InvalidRequestError
from engine_kit.bounded_cache import BoundedCache
from engine_kit.schemas.normal import in_normal_form
from engine_kit.schemas.places import refused
from engine_kit.spelling import unspeakable
from engine_llguidance.grammars import lark
from engine_llguidance.matcher import LLGuidanceMatcher, reason
from engine_llguidance.schemas import blamed
from engine_llguidance.vocabulary import tokenizer

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams
    from engine_llguidance.card import LLGuidanceOptions

FEW = 4
"""Up to so many rows one thread fills them: others would only be woken."""
TOKENIZERS = 8
"""How many sets of end tokens are remembered; each has a tree of the whole vocabulary."""
STEP_ITEMS = 10_000
"""The most parser items of one token: some 10 ms."""
ESTIMATE = 4096, 64
"""Bytes of a compiled constraint, and more for each character of it. The library does not say."""


class LLGuidance:
    """See `engine.interfaces.grammar.Grammar`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._options = cast("LLGuidanceOptions", context.options)
        self._cache: BoundedCache[tuple[str, tuple[int, ...]], LLMatcher] = BoundedCache(self._options.cache_size << 20)
        self._executor = LLExecutor(num_threads=self._options.threads)
        self._limits = LLParserLimits(step_max_items=STEP_ITEMS, verbose_errors=False)
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[tuple[int, ...], LLTokenizer] = OrderedDict()

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        with in_normal_form(constraint) as normal:
            return self._matcher(normal, end_token_ids)

    def _matcher(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        size = self._context.vocab_size
        ends = tuple(sorted(token for token in end_token_ids if token < size))
        try:
            text = lark(constraint, self._options.max_whitespace)
        except Exception as error:  # of the library's reader of EBNF, which raises what it comes upon
            raise InvalidRequestError(constraint.asked, f"LLGuidance cannot read it: {error}") from error
        handle = self._cache.get((text, ends), lambda: self._compile(text, ends, constraint)).deep_copy()
        row = np.zeros(-(-size // 32), np.int32)
        for token in ends:
            row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return LLGuidanceMatcher(handle, frozenset(ends), row, size)

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """LLGuidance lets go of the interpreter's lock and writes into `out`."""
        pending: list[tuple[LLMatcher, int]] = []
        for matcher, row in zip(cast("Sequence[LLGuidanceMatcher]", matchers), rows.tolist(), strict=True):
            if matcher.row is not None:
                out[row] = matcher.row
            elif matcher.made_up:
                out[row] = matcher.mask()
            else:
                pending.append((matcher.handle, row))
        width = out.strides[0]
        if len(pending) > FEW and self._options.threads > 1:
            self._executor.unsafe_compute_mask_ptr(pending, out.ctypes.data, width, len(out))
        else:
            for handle, row in pending:
                handle.unsafe_compute_mask_ptr(out.ctypes.data + row * width, width)

    def close(self) -> None:
        """What compiles has limits of its own, and ends by itself."""

    def _compile(self, text: str, ends: tuple[int, ...], constraint: StructuredOutputsParams) -> tuple[LLMatcher, int]:
        if constraint.choice is not None:
            self._check_spelling(constraint.choice)
        handle = LLMatcher(self._tokenizer(ends), text, log_level=0, limits=self._limits)
        if handle.is_error():
            found = reason(handle)
            if constraint.json is not None and (keyword := blamed(found)):
                raise refused("", keyword, f"LLGuidance cannot enforce it: {found}")
            raise InvalidRequestError(constraint.asked, f"LLGuidance cannot enforce it: {found}")
        beginning = handle.deep_copy()
        beginning.compute_bitmask()  # where nothing may be written it has an end, with which the library gives up
        if beginning.is_error():
            raise InvalidRequestError(constraint.asked, f"nothing can be written under it: {reason(beginning)}")
        base, each = ESTIMATE
        return handle, base + each * len(text)

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        with self._lock:
            if ends not in self._tokenizers:
                self._tokenizers[ends] = tokenizer(self._context.vocabulary(), self._context.vocab_size, ends)
                while len(self._tokenizers) > TOKENIZERS:
                    self._tokenizers.popitem(last=False)
            self._tokenizers.move_to_end(ends)
            return self._tokenizers[ends]

    def _check_spelling(self, texts: Sequence[str]) -> None:
        pieces = self._context.vocabulary()[: self._context.vocab_size]
        if missing := unspeakable(texts, pieces):
            raise InvalidRequestError(
                f"structured_outputs.choice=[{missing!r:.80}]",
                "the model's vocabulary cannot spell it",
                "leave it out, or write it differently",
            )
