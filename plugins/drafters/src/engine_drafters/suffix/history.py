"""Texts that were seen before, in bounded memory."""

from __future__ import annotations

from array import array
from collections import deque

from engine_drafters.suffix.automaton import SEPARATOR, SuffixAutomaton

_VOLUMES = 4
"""A history is kept in about so many volumes, of which the oldest is forgotten as a whole: an automaton cannot forget a
text."""


class FinishedAnswers:
    """What requests of each salt were answered. Answers wait until `settle` reads them in, a few at a time.

    Args:
        max_tokens: remembered at most, of all salts; 0: none. Those that wait are as many at most, beside the answer
            that is being read in.
        depth: see `SuffixAutomaton`.
    """

    def __init__(self, max_tokens: int, depth: int) -> None:
        self._max = max_tokens
        self._depth = depth
        self._volumes: deque[tuple[str | None, SuffixAutomaton]] = deque()  # the oldest first
        self._of_salt: dict[str | None, list[SuffixAutomaton]] = {}
        self._waiting: deque[tuple[str | None, array[int]]] = deque()
        self._salt: str | None = None  # of the answer that is being read in
        self._rest = array("i")  # of it
        self._num_waiting = 0
        self._size = 0

    def add(self, salt: str | None, answer: array[int]) -> None:
        """An answer is finished. Of more than are remembered at all, the first are forgotten unread."""
        if not self._max:
            return
        self._waiting.append((salt, answer[: self._max]))
        self._num_waiting += len(self._waiting[-1][1])
        while self._num_waiting > self._max:
            self._num_waiting -= len(self._waiting.popleft()[1])

    def settle(self, budget: int) -> None:
        """Read in what waits, up to this many tokens. The rest of an answer comes with the next call."""
        while budget > 0 and (self._rest or self._waiting):
            if not self._rest:
                self._salt, self._rest = self._waiting.popleft()
                self._num_waiting -= len(self._rest)
            new, self._rest = self._rest[:budget], self._rest[budget:]
            budget -= len(new)
            volume = self._volume(self._salt)
            before = volume.size
            for token in new:
                volume.add(token)
            if not self._rest:
                volume.add(SEPARATOR)
            self._size += volume.size - before
            while self._size > self._max and self._volumes:
                self._forget()

    def _volume(self, salt: str | None) -> SuffixAutomaton:
        """The one that answers of this salt are written to."""
        volumes = self._of_salt.setdefault(salt, [])
        if not volumes or volumes[-1].size >= max(self._max // _VOLUMES, 1):
            volumes.append(SuffixAutomaton(self._depth))
            self._volumes.append((salt, volumes[-1]))
        return volumes[-1]

    def _forget(self) -> None:
        salt, volume = self._volumes.popleft()
        self._size -= volume.size
        self._of_salt[salt].remove(volume)
        if not self._of_salt[salt]:
            del self._of_salt[salt]

    def volumes(self, salt: str | None) -> list[SuffixAutomaton]:
        """What requests of this salt may look into."""
        return self._of_salt.get(salt, [])


class RequestText:
    """A request's own text, and where it stands in all that it may look into.

    Args:
        tokens: that it enters with.
        num_answered: of these, those that are no part of its next answer.
        salt: whose history it shares.
        max_tokens: of the newest ones, in which its own text is looked for.
        depth: see `SuffixAutomaton`.
    """

    def __init__(self, tokens: array[int], num_answered: int, salt: str | None, max_tokens: int, depth: int) -> None:
        self.tokens = tokens
        self.num_answered = num_answered
        self.salt = salt
        self._half = max(max_tokens // 2, 1)
        self._depth = depth
        self._read = max(0, len(tokens) - max_tokens)
        self._own: list[SuffixAutomaton] = []  # the one before the last, the last
        self._places: dict[SuffixAutomaton, tuple[int, int]] = {}

    def read(self, budget: int, others: list[SuffixAutomaton]) -> tuple[int, bool]:
        """Read on in the own text.

        Args:
            budget: tokens at most.
            others: finished answers that it may look into, too.

        Returns:
            (what is left of the budget, whether it has read to the end).
        """
        end = min(len(self.tokens), self._read + max(budget, 0))
        new = self.tokens[self._read : end]
        self._follow(others, new)
        for token in new:
            if not self._own or self._own[-1].size >= self._half:
                self._own = [*self._own[-1:], SuffixAutomaton(self._depth)]
                self._places[self._own[-1]] = 0, 0
            for volume in self._own:  # found where it stood before, so read before it is written
                self._places[volume] = volume.follow(*self._places[volume], token)
            self._own[-1].add(token)
        self._read = end
        return budget - len(new), end == len(self.tokens)

    def _follow(self, others: list[SuffixAutomaton], new: array[int]) -> None:
        """Go on in the finished answers. What is new, or was forgotten, is entered with the last few tokens."""
        places = {volume: self._places[volume] for volume in self._own}
        last = self.tokens[max(0, self._read + len(new) - self._depth) : self._read + len(new)]
        for volume in others:
            place = self._places.get(volume)
            state, matched = (0, 0) if place is None or len(new) > self._depth else place
            for token in last if place is None or len(new) > self._depth else new:
                state, matched = volume.follow(state, matched, token)
            places[volume] = state, matched
        self._places = places

    def drafts(self, most: int, ahead: int, min_match: int, max_factor: float, least: float) -> list[int]:
        """What follows the text, by the place that promises most.

        Args:
            most: tokens at most; ahead: so many are looked at to choose.
            min_match, max_factor, least: see `SuffixOptions`; `least` is its `min_probability`.
        """
        found: list[int] = []
        best = 0.0
        for volume, (state, matched) in self._places.items():
            if matched < min_match:
                continue
            longest = int(matched * max_factor)
            tokens, score = volume.continuation(state, matched, min(ahead, longest), least)
            if score > best:
                found, best = tokens, score
                if most > ahead:
                    found, _ = volume.continuation(state, matched, min(most, longest), least)
        return found[:most]
