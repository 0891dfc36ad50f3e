"""One request's place in its constraint."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import xgrammar as xgr

from engine.types.errors import EngineError, InvalidRequestError

SLOW_SECONDS = 0.1
"""What takes longer than this holds up all requests."""
STRIKES = 3
"""How often one may do so, for reasons of the machine's, before its request ends. Compiling has tried the constraint;
this is for what slips through, as an ambiguous grammar does, whose parser takes longer with each token."""


class XGrammarMatcher:
    """See `engine.interfaces.grammar.Matcher`.

    Args:
        compiled: the constraint.
        ends: ids that end the sequence.
        ends_row: int32 [words]; the mask of these.

    Attributes:
        handle: XGrammar's own.
        row: int32 [words]; the mask for the next token, where it is known already.
        failure: the error with which the request is to end, once it is found.
    """

    __slots__ = ("_ended", "_ends", "_ends_row", "_strikes", "failure", "handle", "row")

    def __init__(self, compiled: xgr.CompiledGrammar, ends: frozenset[int], ends_row: np.ndarray) -> None:
        self.handle = xgr.GrammarMatcher(compiled, override_stop_tokens=sorted(ends) or None)
        self._ends = ends
        self._ends_row = ends_row
        self._ended = False
        self._strikes = 0
        self.row: np.ndarray | None = None
        self.failure: EngineError | None = None

    def accept(self, tokens: Sequence[int]) -> int:
        if self.failure is not None:
            raise self.failure
        began = time.perf_counter()
        for count, token in enumerate(tokens):
            if self._ended or not self.handle.accept_token(token):
                return count
            self.row = None
            self._ended = token in self._ends
        self.took(time.perf_counter() - began)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.handle.rollback(num_tokens)
            self._ended = False
            self.row = None

    def forced_bytes(self) -> bytes:
        """The library gives text: within a character, of which some bytes are written, it cannot."""
        if self._ended or self.failure is not None:
            return b""
        began = time.perf_counter()
        try:
            forced: str = self.handle.find_jump_forward_string()
        except UnicodeDecodeError:
            return b""
        self.took(time.perf_counter() - began)
        return forced.encode(errors="ignore")

    def took(self, seconds: float) -> None:
        """Something about this matcher took so long."""
        if seconds > SLOW_SECONDS:
            self._strikes += 1
            if self._strikes == STRIKES:
                self.failure = InvalidRequestError(
                    "go on under structured_outputs",
                    f"{STRIKES} times a token under this constraint took more than {SLOW_SECONDS:g} s, for which all "
                    "other requests had to wait",
                    "ask for something simpler: an ambiguous grammar takes longer with each token",
                )

    @property
    def finished(self) -> bool:
        """Where the output is complete its mask says whether it may go on, and is kept for then."""
        if self._ended:
            return True
        if not self.handle.is_completed():
            return False
        if self.row is None:
            self.row = np.empty_like(self._ends_row)
            self.handle.fill_next_token_bitmask(self.row[None])
        return not (self.row & ~self._ends_row).any()
