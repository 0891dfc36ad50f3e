"""Grammar `xgrammar` at work."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import xgrammar as xgr

from engine.types.errors import InvalidRequestError
from engine_kit.bounded_cache import BoundedCache
from engine_kit.schemas.pattern import parsed, whole
from engine_kit.spelling import unspeakable
from engine_xgrammar.compiler import GrammarSource
from engine_xgrammar.matcher import SLOW_SECONDS, XGrammarMatcher
from engine_xgrammar.patterns import rule
from engine_xgrammar.schemas import Rewriting
from engine_xgrammar.tags import with_format
from engine_xgrammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams
    from engine_kit.compiling.processes import CompilerProcesses
    from engine_xgrammar.card import XGrammarOptions

FEW = 4
"""Up to so many rows one thread fills them: others would only be woken."""
WATCHED_STEPS = 32
"""How many steps after a slow one are filled row by row, with a watch in hand."""


class Work:
    """See `engine.interfaces.grammar.Grammar`; the compilers are who made it's to close."""

    def __init__(self, context: GrammarContext, compilers: CompilerProcesses) -> None:
        self._context = context
        self._compilers = compilers
        self._options = cast("XGrammarOptions", context.options)
        self._cache: BoundedCache[bytes, xgr.CompiledGrammar] = BoundedCache(self._options.cache_size << 20)
        self._batch = xgr.BatchGrammarMatcher(self._options.threads)
        self._lock = threading.Lock()
        self._known: Vocabulary | None = None
        self._watched = 0

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        source = _source(constraint, self._options.max_whitespace)
        compiled = self._cache.get(msgspec.msgpack.encode(source), lambda: self._compile(source, constraint))
        ends = frozenset(token for token in end_token_ids if token < self._context.vocab_size)
        row = np.zeros(-(-self._context.vocab_size // 32), np.int32)
        for token in ends:
            row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return XGrammarMatcher(compiled, ends, row)

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """XGrammar lets go of the interpreter's lock and writes into `out`."""
        pending: list[XGrammarMatcher] = []
        places: list[int] = []
        for matcher, row in zip(cast("Sequence[XGrammarMatcher]", matchers), rows.tolist(), strict=True):
            if matcher.failure is not None:
                out[row] = -1
            elif matcher.row is not None:
                out[row] = matcher.row
            else:
                pending.append(matcher)
                places.append(row)
        if self._watched:
            self._watched -= 1
            return self._fill_watched(pending, places, out)
        began = time.perf_counter()
        if len(pending) > FEW and self._options.threads > 1:
            self._batch.batch_fill_next_token_bitmask([matcher.handle for matcher in pending], out, places)
        else:
            for matcher, row in zip(pending, places, strict=True):
                matcher.handle.fill_next_token_bitmask(out, row)
        if pending and time.perf_counter() - began > SLOW_SECONDS:
            self._watched = WATCHED_STEPS

    def _fill_watched(self, matchers: list[XGrammarMatcher], rows: list[int], out: np.ndarray) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            began = time.thread_time()  # not what others took meanwhile
            matcher.handle.fill_next_token_bitmask(out, row)
            matcher.took(time.thread_time() - began)

    # -- compiling ----------------------------------------------------------------------------------------------------
    def _compile(self, source: GrammarSource, constraint: StructuredOutputsParams) -> tuple[xgr.CompiledGrammar, int]:
        known, encoded = self._vocabulary(), msgspec.msgpack.encode(source)
        if constraint.choice is not None:
            self._check_spelling(constraint.choice)
        try:
            data = self._compilers.compile(encoded)
        except InvalidRequestError as error:
            raise InvalidRequestError(constraint.asked, error.found, error.remedy) from error
        compiled = xgr.CompiledGrammar.deserialize_json(data.decode(), known.of(source.kind))
        return compiled, compiled.memory_size_bytes + len(encoded)

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._known is None:
                self._known = Vocabulary(self._context.vocabulary(), self._context.vocab_size)
            return self._known

    def _check_spelling(self, texts: Sequence[str]) -> None:
        pieces = self._context.vocabulary()[: self._context.vocab_size]
        if missing := unspeakable(texts, pieces):
            raise InvalidRequestError(
                f"structured_outputs.choice=[{missing!r:.80}]",
                "the model's vocabulary cannot spell it",
                "leave it out, or write it differently",
            )


def _source(constraint: StructuredOutputsParams, max_whitespace: int) -> GrammarSource:
    (kind,) = constraint.kinds
    rewriting = Rewriting()
    if kind == "json":
        text = json.dumps(rewriting.schema(constraint.schema))
    elif kind == "choice":
        text = json.dumps(list(dict.fromkeys(constraint.choice or ())))
    elif kind == "json_object":
        text = ""
    elif kind == "structural_tag":
        text = json.dumps(rewriting.tag(with_format(constraint.schema)))
    elif constraint.regex is not None:
        text = rule(parsed(whole(constraint.regex)), in_json=False)
    else:
        text = constraint.grammar or ""
    return GrammarSource(kind, text, max_whitespace, rewriting.rules)
