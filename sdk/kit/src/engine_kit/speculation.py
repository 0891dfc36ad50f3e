"""How many drafts each request gets in its next step: speculation that follows what it measures.

The rule, for each request by itself. Where a draft is right with probability p, k drafts bring

    1 + p + p^2 + ... + p^k  tokens in  t(rows, k) / t(rows, 0)  times a step without drafts,

and k, from 0 to the option `num_tokens`, is what brings most in that time. t is `StepTimes`: measured, or by the option
`cost`. It grows with the rows that decode: the more tokens a step has anyway, the more of its time goes by tokens.

    p         right / (right + wrong) drafts, where what was seen counts 0.9 times as much with each step since. Wrong
              ones are those that were not accepted behind accepted ones, one a step at most; nothing found is one. At
              the start 1.5 right and 0.5 wrong ones. Of a tree those are right that were on the path that was drawn.
    k = 0     No drafts until 4 more tokens have come, then one as a probe. After each probe that leaves k at 0 the
              pause is twice as long, up to 64 tokens, and what was seen counts as two drafts at most: so one probe
              that is accepted mostly ends it. Where t is measured nobody has drafts in two steps of each 100, the
              first ones: there is no other way to know what a step without takes.

Of a tree k is all drafts or none, and the sum above ends with the most that follow one another.

With `adaptive` off k stays `num_tokens`. docs/operators/speculation.md shows k, and what it is worth, in tables.

The drafts of one step share what the budget leaves after the decodes: all of it where nobody waits for a prompt to be
computed, half of it otherwise. Requests admitted first come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.types.plan import StepPlan

if TYPE_CHECKING:
    from engine.scheduling.slots import SlotTable

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
_START = 1.5, 0.5
_DECAY = 0.9
_AT_REST = 2.0
_SHARES = 64
"""p is looked up in steps of 1 / 64."""
_UNKNOWN_COST = 0.05
_TIMES_DECAY, _LONGEST = 0.99, 4.0
_FIT_EVERY = 8
_PLAIN, _PERIOD = 2, 100


class StepTimes:
    """What a step of decodes takes: a + b * its tokens, and with drafts c + d * k beside, k the most of a row.

    Least squares, of what it is wrong by as a part of each step that was timed. One counts 0.99 times as much with each
    later one, and ten times as much as the guess: that drafts cost nothing beside their tokens, and one in the step of
    a single request so much of it as `cost` says. A step takes four times what it should take, at most.
    """

    def __init__(self, cost: float) -> None:
        self._guess = self._found = np.array((1 - cost, cost, 0.0, 0.0))  # a, b, c, d
        self._squares = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self._weight = 0.0

    def add(self, rows: int, num_drafts: int, most: int | None, seconds: float) -> None:
        """A step of so many rows and drafts took so long. most: drafts of a row; None: none were wanted."""
        step = np.array((1, rows + num_drafts, most is not None, most or 0), float)
        if self._weight and (expected := float(step @ self._found)) > 0:
            seconds = min(seconds, _LONGEST * expected)
        step /= seconds
        self._squares = _TIMES_DECAY * self._squares + step[:, None] * step
        self._sums = _TIMES_DECAY * self._sums + step
        self._weight = _TIMES_DECAY * self._weight + 1

    def fit(self) -> None:
        """Take what was added in."""
        unit = self._weight / float(self._sums @ self._guess)  # seconds
        missed = self._sums - self._squares @ (unit * self._guess)
        self._found = unit * self._guess + np.linalg.solve(self._squares + 0.1 / unit**2 * np.eye(4), missed)

    def of(self, rows: int, num_tokens: int) -> np.ndarray:
        """float64 [num_tokens + 1]; of so many rows with 0, 1, ... drafts each, in a unit of its own."""
        k = np.arange(num_tokens + 1)
        a, b, c, d = self._found
        times = a + b * rows * (1 + k) + (k > 0) * (c + d * k)
        return np.maximum.accumulate(times.clip(min=1e-9))


def best_lengths(times: np.ndarray, least: int = 1, depth: int = 0) -> np.ndarray:
    """int32 [65]; k, which is 0 or `least` and more, by 64 p. times: of `StepTimes`; depth: see `Speculation`."""
    chances = (np.arange(_SHARES + 1) / _SHARES)[:, None] ** np.arange(times.size)
    chances[:, 1 + (depth or times.size) :] = 0
    tokens = chances.cumsum(axis=1)
    tokens[:, 1:least] = 0
    best: np.ndarray = (tokens / times).argmax(axis=1).astype(np.int32)
    return best


class Speculation:
    """Draft lengths of all slots.

    Args:
        num_slots: slots.
        num_tokens: the most drafts of a request in one step.
        adaptive: see the module.
        cost: of a draft in the step of a single request, as a part of that step without drafts; None: measured.
        least: k is 0 or not below it; probes have so many.
        max_rows: the cost does not grow beyond so many; None: `num_slots`.
        depth: of the trees that are drafted, how many drafts follow one another at most; 0: chains.

    Attributes:
        num_rows: rows of steps that were to have drafts.
        num_drafts, num_accepted: drafts that were computed, and that became output, since start.
        accepted_at: int64 [num_tokens]; of these, how many at each place behind the row's token.
    """

    def __init__(
        self,
        num_slots: int,
        num_tokens: int,
        adaptive: bool = True,
        cost: float | None = _UNKNOWN_COST,
        least: int = 1,
        max_rows: int | None = None,
        depth: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self.adaptive = adaptive
        self.num_rows = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.accepted_at = np.zeros(num_tokens, np.int64)
        self._least = least
        self._depth = depth or num_tokens
        self._max_rows = max_rows or num_slots
        self._times = StepTimes(_UNKNOWN_COST if cost is None else cost)
        self._measures = adaptive and cost is None
        self._num_planned = 0
        self._num_timed = 0
        self._best: dict[int, np.ndarray] = {}  # of `best_lengths`, by rows
        self._of_share = self._best_of(1)  # by the rows that decoded last
        self._result_at = np.inf  # of the last step
        self._had_drafts = False
        self._right = np.zeros(num_slots)
        self._wrong = np.zeros(num_slots)
        self._share = np.zeros(num_slots, np.int32)
        self._pause = np.full(num_slots, _FIRST_PAUSE, np.int32)
        self._probe_at = np.zeros(num_slots, np.int32)  # tokens of the request at which drafts are tried again

    def enter(self, slot: int) -> None:
        """A request enters this slot: nothing is known of it."""
        self._right[slot], self._wrong[slot] = _START
        self._share[slot] = _SHARES * _START[0] / sum(_START)
        self._probe_at[slot] = 0
        self._pause[slot] = _FIRST_PAUSE

    def drafts(self, ready: np.ndarray, slots: SlotTable, room: int) -> np.ndarray:
        """int32 [n]; the drafts of each slot in the step that is being planned.

        Args:
            ready: int [n]; slots that compute one token.
            room: tokens of the budget for all drafts.
        """
        placed = slots.placed[ready]
        self._of_share = self._best_of(min(max(ready.size, 1), self._max_rows))
        if self._measures and ready.size:
            self._num_planned += 1
            if self._num_planned % _PERIOD in range(1, 1 + _PLAIN):
                return np.zeros(ready.size, np.int32)
        k: np.ndarray = np.maximum(self._of_share[self._share[ready]], self._least)
        k = np.minimum(k, slots.limit[ready] - placed - 1)  # one token comes without drafts
        k[placed < self._probe_at[ready]] = 0
        if np.add.reduce(k) > room:
            first = np.argsort(slots.order[ready])
            before = np.cumsum(k[first]) - k[first]
            k[first] = np.clip(room - before, 0, k[first])
        return k

    def _best_of(self, rows: int) -> np.ndarray:
        best = self._best.get(rows)
        if best is None:
            best = best_lengths(self._times.of(rows, self.num_tokens), self._least, self._depth)
            self._best[rows] = best if self.adaptive else np.full_like(best, self.num_tokens)
        return self._best[rows]

    def took(self, plan: StepPlan, found: np.ndarray | None, now: float) -> None:
        """A step's result has come. What only decodes is timed, from the result before to its own, where the step
        before was of its kind: one without drafts is under way before that result comes.

        found: int [R]; the drafts that it had; None where none were wanted. now: seconds.
        """
        seconds, alike = now - self._result_at, self._had_drafts == (found is not None)
        self._result_at = now
        self._had_drafts = found is not None
        if not (self._measures and alike and seconds > 0) or plan.new_slots or not plan.samples.all():
            return
        if plan.total_tokens > plan.num_rows + (0 if plan.num_drafts is None else int(plan.num_drafts.sum())):
            return  # a prompt's last tokens
        self._num_timed += 1
        num_drafts, most = (0, None) if found is None else (int(found.sum()), int(found.max()))
        self._times.add(plan.num_rows, num_drafts, most, seconds)
        if self._num_timed < _FIT_EVERY or self._num_timed % _FIT_EVERY == 0:
            self._times.fit()
            self._best.clear()

    def learn(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What became of the drafts of a step.

        slots: int [n]; known: int [n], tokens known after it; drafted, accepted: int [n].
        """
        self.num_rows += slots.size
        self.num_drafts += int(np.add.reduce(drafted))
        self.num_accepted += int(np.add.reduce(accepted))
        self.accepted_at += np.add.reduce(accepted[:, None] > np.arange(self.accepted_at.size))
        if not self.adaptive:
            return
        right = _DECAY * self._right[slots] + accepted
        wrong = _DECAY * self._wrong[slots] + (accepted < np.clip(drafted, 1, self._depth))
        seen = right + wrong
        share = self._share[slots] = (_SHARES * right / seen).astype(np.int32)
        rests = self._of_share[share] == 0
        scale = np.where(rests, np.minimum(1, _AT_REST / seen), 1)
        self._right[slots] = scale * right
        self._wrong[slots] = scale * wrong
        self._pause[slots[~rests]] = _FIRST_PAUSE
        resting = slots[rests]
        self._probe_at[resting] = known[rests] + self._pause[resting]
        self._pause[resting] = np.minimum(2 * self._pause[resting], _LONGEST_PAUSE)
