"""A suffix automaton that counts: where has this text's end occurred before, and what followed how often?

The smallest automaton that reads all pieces of a text (Blumer et al., "The smallest automaton recognizing the subwords
of a text", 1985). Its states are sets of pieces that end at the same places; n tokens make fewer than 2 n states. It
grows by one token at a time, in constant time on average. Counting what follows each piece, up to a depth, takes a walk
over at most that many states; of ordinary text, over some ten.
"""

from __future__ import annotations

SEPARATOR = -1
"""Ends a text where another one follows it. No token, so nothing that spans two texts is ever looked for."""
_NOTHING = -2


class SuffixAutomaton:
    """All pieces of a growing text.

    Args:
        depth: of the longest piece whose followers are counted; at least 1.

    Attributes:
        size: tokens that were added, separators among them.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = 0
        # Of each state; state 0 is that of the empty piece.
        self._next: list[dict[int, int]] = [{}]
        self._length = [0]  # of its longest piece
        self._link = [0]  # the state of its longest piece's longest end that is not in it
        self._count = [0]  # how often it occurs
        self._followed = [0]  # how often it occurs with something behind it
        self._best = [_NOTHING]  # what follows it most often, of equals the last
        self._last = 0  # the state of the whole text
        self._deep = 0  # the state of its last depth + 1 tokens

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        link, length, count, next_ = self._link, self._length, self._count, self._next
        before = self._shortened(
            self._deep, self.depth
        )  # of the text so far; the pieces that a follower is counted for
        self._extend(token)
        self.size += 1
        deep = self._deep = self._shortened(next_[self._shortened(self._deep, self.depth + 1)][token], self.depth + 1)
        while deep:
            count[deep] += 1
            deep = link[deep]
        count[0] += 1
        followed, best = self._followed, self._best
        # What was added may have divided the state: its shorter pieces are in a new one, which it is linked to.
        state = self._shortened(before, self.depth)
        while True:
            followed[state] += 1
            known = best[state]
            after = next_[state]
            if known != token and (known == _NOTHING or count[after[token]] >= count[after[known]]):
                best[state] = token
            if not length[state]:
                break
            state = link[state]

    def _shortened(self, state: int, depth: int) -> int:
        """The state of the last `depth` tokens of a piece of this state."""
        link, length = self._link, self._length
        while length[link[state]] >= depth:
            state = link[state]
        return state

    def _extend(self, token: int) -> None:
        """The states and transitions of the text with this token: Blumer's construction."""
        link, length, next_ = self._link, self._length, self._next
        state = self._last
        new = self._last = self._state(length[state] + 1, {}, 0, _NOTHING, 0)
        while token not in next_[state]:
            next_[state][token] = new
            if not state:
                return
            state = link[state]
        target = next_[state][token]
        if length[target] != length[state] + 1:  # longer pieces of the target end at other places from now on
            whole = target
            target = self._state(
                length[state] + 1,
                dict(next_[whole]),
                self._count[whole],
                self._best[whole],
                self._followed[whole],
            )
            link[target] = link[whole]
            link[whole] = target
            while next_[state].get(token) == whole:
                next_[state][token] = target
                if not state:
                    break
                state = link[state]
        link[new] = target

    def _state(self, length: int, following: dict[int, int], count: int, best: int, followed: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._count.append(count)
        self._best.append(best)
        self._followed.append(followed)
        self._link.append(0)
        return len(self._link) - 1

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """A reader's text goes on with this token: the longest of its ends that occurs here, up to the depth.

        Args:
            state, matched: that of the text so far, and its length; (0, 0) for an empty one. What was added since does
                not matter.

        Returns:
            (state, matched) of the text with the token.
        """
        link, length, next_ = self._link, self._length, self._next
        while matched <= length[link[state]] and state:  # the state was divided since
            state = link[state]
        while token not in next_[state]:
            if not state:
                return 0, 0
            state = link[state]
            matched = length[state]
        state, matched = next_[state][token], matched + 1
        if matched > self.depth:
            matched = self.depth
        return self._shortened(state, matched), matched

    def continuation(self, state: int, matched: int, most: int, least: float) -> tuple[list[int], float]:
        """What follows most often, token by token, each time behind the longest piece that was ever followed.

        Args:
            state, matched: of the text, see `follow`.
            most: tokens at most.
            least: the probability of all tokens together is not below it.

        Returns:
            (the tokens, the sum of the probabilities that all up to each are right: how many are right on average).
        """
        link, length, next_ = self._link, self._length, self._next
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < most:
            if matched > self.depth:
                matched = self.depth
            while matched <= length[link[state]] and state:
                state = link[state]
            while self._best[state] == _NOTHING and state:  # the text ends here: a shorter end of it may go on
                state = link[state]
                matched = length[state]
            token = self._best[state]
            if not state or token == SEPARATOR:
                break
            after = next_[state][token]
            probability *= self._count[after] / self._followed[state]
            if probability < least:
                break
            tokens.append(token)
            score += probability
            state, matched = after, matched + 1
        return tokens, score
