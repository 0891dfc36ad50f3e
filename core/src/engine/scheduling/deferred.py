"""A constraint that begins later: what comes before, a model's reasoning say, is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interfaces.grammar import Matcher


class Deferred:
    """Implements `engine.interfaces.grammar.Matcher` around another, which hears of nothing before some ids have come
    one after the other. Until then every token is allowed.

    Args:
        matcher: of the constraint.
        start_after: ids, at least one.

    Attributes:
        matcher: it.
        started: the ids have come.
    """

    __slots__ = ("_last", "_start_after", "matcher", "started")

    def __init__(self, matcher: Matcher, start_after: Sequence[int]) -> None:
        self.matcher, self.started = matcher, False
        self._start_after = deque(start_after)
        self._last: deque[int] = deque(maxlen=len(start_after))

    def accept(self, tokens: Sequence[int]) -> int:
        """See the interface."""
        for count, token in enumerate(tokens):
            if self.started:
                return count + self.matcher.accept(tokens[count:])
            self._last.append(token)
            self.started = self._last == self._start_after
        return len(tokens)

    @property
    def finished(self) -> bool:
        """See the interface."""
        return self.started and self.matcher.finished
