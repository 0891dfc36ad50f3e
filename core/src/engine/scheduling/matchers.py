"""Matchers: each constrained request's place in its constraint, whichever driver compiled it, and the masks of tokens.

What a position of a row with drafts may draw depends on the drafts before it. So a matcher is led along its row's
drafts, tells its mask at each place, and is led back: it has heard of nothing. Behind a draft that the constraint does
not allow, or that ends the request, no draw counts, and there is no mask. The matchers go along together, place by
place, so that a driver fills the masks of a place for all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from engine.interfaces.grammar import MAX_ROLLBACK
from engine.types.errors import EngineError

if TYPE_CHECKING:
    from engine.interfaces.grammar import Grammar, GrammarCard, Matcher
    from engine.plugin.candidate import Candidate


class GrammarDriver(NamedTuple):
    """One driver at work.

    Args:
        candidate: where it comes from.
        card: its card.
        grammar: its body.
    """

    candidate: Candidate
    card: type[GrammarCard]
    grammar: Grammar


class RequestMatcher:
    """A request's place in its constraint. Implements `engine.interfaces.grammar.Matcher` around a driver's.

    What the driver raises ends the request, and nothing else: `accept` raises it, when the next token comes at the
    latest, and until then everything is allowed. Given no tokens, `accept` does that and nothing else.

    Args:
        matcher: the driver's own, at the beginning of the output.
        driver: whose.
        start_after: the constraint begins where these ids have come one after the other, as at the end of a model's
            reasoning: the driver's matcher hears of nothing before, and every token is allowed. None: at once.

    Attributes:
        failed: what the driver raised; None as long as it has not.
        started: the constraint has begun.
    """

    __slots__ = ("_before", "_inside", "_start_after", "driver", "failed", "matcher", "started")

    def __init__(self, matcher: Matcher, driver: GrammarDriver, start_after: Sequence[int] | None = None) -> None:
        self.matcher = matcher
        self.driver = driver
        self.failed: EngineError | None = None
        self.started = not start_after
        self._start_after = list(start_after or ())
        self._before: deque[int] = deque(maxlen=len(self._start_after) + MAX_ROLLBACK)  # tokens up to the start
        self._inside = 0  # tokens behind it

    def accept(self, tokens: Sequence[int]) -> int:
        if self.failed is None:
            before = 0
            while not self.started and before < len(tokens):
                self._before.append(tokens[before])
                before += 1
                self.started = self._begins()
            try:
                inside = self.matcher.accept(tokens[before:] if before else tokens) if before < len(tokens) else 0
                self._inside += inside
                return before + inside
            except Exception as error:
                self.fail(error)
        raise cast("EngineError", self.failed)

    def rollback(self, num_tokens: int) -> None:
        """May lead back to where everything is allowed."""
        inside = min(num_tokens, self._inside)
        if inside and self.failed is None:
            try:
                self.matcher.rollback(inside)
            except Exception as error:
                self.fail(error)
        self._inside -= inside
        for _ in range(num_tokens - inside):
            self._before.pop()
            self.started = False

    def forced_bytes(self) -> bytes:
        if self.started and self.failed is None:
            try:
                return self.matcher.forced_bytes()
            except Exception as error:
                self.fail(error)
        return b""

    @property
    def finished(self) -> bool:
        if self.started and self.failed is None:
            try:
                return self.matcher.finished
            except Exception as error:
                self.fail(error)
        return False

    def fail(self, error: Exception) -> None:
        """The driver raised this over it."""
        self.failed = self.driver.candidate.fault("follow a request's structured_outputs", error)

    def _begins(self) -> bool:
        if len(self._before) < len(self._start_after):
            return False
        return all(a == b for a, b in zip(reversed(self._before), reversed(self._start_after), strict=False))


def fill_masks(matchers: Sequence[RequestMatcher], rows: np.ndarray, out: np.ndarray) -> None:
    """Write which tokens each matcher allows next, as `engine.interfaces.grammar.Grammar.fill_masks` does.

    Each driver is asked once; where it raises, once for each matcher, and whoever it raises over fails. Nothing is
    asked about those that have failed before, or whose constraint has not begun.
    """
    places: dict[int, list[int]] = {}
    for place, matcher in enumerate(matchers):
        if matcher.started and matcher.failed is None:
            places.setdefault(id(matcher.driver), []).append(place)
        else:
            out[rows[place]] = -1
    for of_driver in places.values():
        mine = [matchers[place] for place in of_driver]
        at, grammar = rows if len(mine) == len(matchers) else rows[of_driver], mine[0].driver.grammar
        try:
            grammar.fill_masks([matcher.matcher for matcher in mine], at, out)
        except Exception:
            for place, matcher in enumerate(mine):
                try:
                    grammar.fill_masks([matcher.matcher], at[place : place + 1], out)
                except Exception as error:
                    matcher.fail(error)
                    out[at[place]] = -1


# -- along drafts ------------------------------------------------------------------------------------------------------
class DraftedRow(NamedTuple):
    """A constrained row.

    Args:
        matcher: behind the tokens before the drafts.
        drafts: of the row, perhaps none.
        stops: ids that end the request: nothing is drawn behind them.
    """

    matcher: RequestMatcher
    drafts: Sequence[int]
    stops: frozenset[int]


def draft_masks(rows: Sequence[DraftedRow], words: int) -> tuple[np.ndarray, np.ndarray]:
    """The masks of each row's positions, as far as draws there may count. A matcher that fails on the way is not led
    back: it raises again when it is asked next.

    Args:
        words: of a mask.

    Returns:
        How many each row has, at least 1: int64 [m]; and the masks, row by row, position by position: int32
        [sum of these, words].
    """
    most = np.array([1 + len(row.drafts) for row in rows], np.int64)
    start = np.cumsum(most) - most
    bits = np.empty((int(most.sum()), words), np.int32)
    counts = np.zeros(len(rows), np.int64)
    going = list(range(len(rows)))
    while going:
        places = (start + counts)[going].astype(np.int32)
        fill_masks([rows[i].matcher for i in going], places, bits)
        counts[going] += 1
        going = [
            i for i, at in zip(going, places.tolist(), strict=True) if _goes_on(rows[i], int(counts[i]) - 1, bits[at])
        ]
    for (matcher, _, _), count in zip(rows, counts.tolist(), strict=True):
        if count > 1 and matcher.failed is None:
            matcher.rollback(count - 1)
    if counts.sum() < most.sum():
        place = np.arange(most.sum()) - start.repeat(most)
        bits = bits[place < counts.repeat(most)]
    return counts, bits


def _goes_on(row: DraftedRow, place: int, mask: np.ndarray) -> bool:
    """Lead the matcher over its next draft; False where there is no place behind it at which a draw may count."""
    if place == len(row.drafts):
        return False
    token, matcher = row.drafts[place], row.matcher
    if token in row.stops or not mask[token >> 5] >> (token & 31) & 1:
        return False
    try:
        if not matcher.accept([token]):
            return False
    except EngineError:
        return False
    if matcher.finished:
        matcher.rollback(1)
        return False
    return True
