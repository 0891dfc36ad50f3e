"""The body of grammar `outlines`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
from outlines_core import Index

from engine.types.errors import InvalidRequestError
from engine_kit.bounded_cache import BoundedCache
from engine_kit.compiling.processes import CompilerProcesses
from engine_kit.schemas.normal import in_normal_form
from engine_kit.spelling import unspeakable
from engine_outlines.compiler import OutlinesSource
from engine_outlines.matcher import OutlinesMatcher

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams
    from engine_outlines.card import OutlinesOptions

EXPANDED = 3
"""What an automaton takes in memory, where it takes 1 as it travels. An estimate."""


class Outlines:
    """See `engine.interfaces.grammar.Grammar`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._options = cast("OutlinesOptions", context.options)
        self._cache: BoundedCache[bytes, Index] = BoundedCache(self._options.cache_size << 20)
        self._compilers = CompilerProcesses("engine_outlines.compiler:Compiler", context)

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        with in_normal_form(constraint) as normal:
            return self._matcher(normal, end_token_ids)

    def _matcher(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        size = self._context.vocab_size
        source = msgspec.msgpack.encode(OutlinesSource(*_source(constraint), self._options.max_whitespace))
        index = self._cache.get(source, lambda: self._compile(source, constraint))
        ends = frozenset(token for token in end_token_ids if token < size)
        row = np.zeros(-(-size // 32), np.int32)
        for token in ends:
            row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return OutlinesMatcher(index, ends, row, size, self._context.vocabulary())

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """A mask is written in some 50 microseconds, by a look into a table."""
        for matcher, row in zip(cast("Sequence[OutlinesMatcher]", matchers), rows.tolist(), strict=True):
            out[row] = matcher.mask()

    def close(self) -> None:
        self._compilers.close()

    def _compile(self, source: bytes, constraint: StructuredOutputsParams) -> tuple[Index, int]:
        if constraint.choice is not None:
            pieces = self._context.vocabulary()[: self._context.vocab_size]
            if missing := unspeakable(constraint.choice, pieces):
                raise InvalidRequestError(
                    f"structured_outputs.choice=[{missing!r:.80}]",
                    "the model's vocabulary cannot spell it",
                    "leave it out, or write it differently",
                )
        try:
            data = self._compilers.compile(source)
        except InvalidRequestError as error:
            raise InvalidRequestError(constraint.asked, error.found, error.remedy) from error
        return Index.from_binary(data), EXPANDED * len(data)


def _source(constraint: StructuredOutputsParams) -> tuple[str, str]:
    (kind,) = constraint.kinds
    if kind == "json":
        return kind, json.dumps(constraint.schema)
    if kind == "choice":
        return kind, json.dumps(list(dict.fromkeys(constraint.choice or ())))
    return kind, str(constraint.regex)
