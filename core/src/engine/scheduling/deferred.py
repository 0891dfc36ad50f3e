"""A constraint that begins later: what comes before, a model's reasoning say, is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.interfaces.grammar import MAX_ROLLBACK

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

    __slots__ = ("_before", "_inside", "_start_after", "matcher", "started")

    def __init__(self, matcher: Matcher, start_after: Sequence[int]) -> None:
        self.matcher, self.started = matcher, False
        self._start_after = list(start_after)
        self._before: deque[int] = deque(maxlen=len(start_after) + MAX_ROLLBACK)  # tokens up to the start
        self._inside = 0  # tokens behind it

    def accept(self, tokens: Sequence[int]) -> int:
        """See the interface."""
        for count, token in enumerate(tokens):
            if self.started:
                inside = self.matcher.accept(tokens[count:])
                self._inside += inside
                return count + inside
            self._before.append(token)
            self.started = self._begins()
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        """See the interface. It may lead back to where everything is allowed."""
        inside = min(num_tokens, self._inside)
        if inside:
            self.matcher.rollback(inside)
            self._inside -= inside
        for _ in range(num_tokens - inside):
            self._before.pop()
            self.started = False

    def forced_bytes(self) -> bytes:
        """See the interface."""
        return self.matcher.forced_bytes() if self.started else b""

    @property
    def finished(self) -> bool:
        """See the interface."""
        return self.started and self.matcher.finished

    def _begins(self) -> bool:
        if len(self._before) < len(self._start_after):
            return False
        return all(a == b for a, b in zip(reversed(self._before), reversed(self._start_after), strict=False))
