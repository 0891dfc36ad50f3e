"""How many drafts each request gets in its next step: speculation that follows what it measures.

The rule, for each request by itself, where k never exceeds the option `num_tokens`:

    start                         k = num_tokens
    all drafts were accepted      k doubles
    some were, or none            k is one more than were accepted
    two steps in a row with none  no drafts until 4 more tokens have come; then one draft as a probe. A probe that fails
                                  doubles the pause, up to 64 tokens; an accepted draft ends all that.

A step for which the drafter found nothing counts as one with none accepted. With `adaptive` off k stays `num_tokens`.

The drafts of one step share what the budget leaves after the decodes: all of it where nobody waits for a prompt to be
computed, half of it otherwise. Requests admitted first come first.
"""

from __future__ import annotations

import numpy as np

from engine.scheduling.slots import SlotTable

_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
_MISSES = 2


class Speculation:
    """Draft lengths of all slots.

    Args:
        num_slots: slots.
        num_tokens: the most drafts of a request in one step.
        adaptive: see the module.
        least: k is never below it. Pauses are as ever.

    Attributes:
        num_drafts, num_accepted: drafts that were computed, and that became output, since start.
    """

    def __init__(self, num_slots: int, num_tokens: int, adaptive: bool = True, least: int = 1) -> None:
        self.num_tokens = num_tokens
        self.adaptive = adaptive
        self.least = least
        self.num_drafts = 0
        self.num_accepted = 0
        self._k = np.full(num_slots, num_tokens, np.int32)
        self._misses = np.zeros(num_slots, np.int32)
        self._pause = np.full(num_slots, _FIRST_PAUSE, np.int32)
        self._probe_at = np.zeros(num_slots, np.int32)  # tokens of the request at which drafts are tried again

    def enter(self, slot: int) -> None:
        """A request enters this slot: nothing is known of it."""
        self._k[slot] = self.num_tokens
        self._misses[slot] = self._probe_at[slot] = 0
        self._pause[slot] = _FIRST_PAUSE

    def choose(self, ready: np.ndarray, slots: SlotTable, room: int, constrained: bool) -> np.ndarray | None:
        """The drafts of decodes, int32 [n]; None for none at all.

        Args:
            ready: int [n]; slots that compute one token.
            room: tokens of the budget for all drafts.
            constrained: whether requests with a matcher may have some.
        """
        k = self.drafts(ready, slots.placed[ready], slots.limit[ready], slots.order[ready], room)
        if slots.num_waits:  # who reads tokens on the host has not seen the drafts before a position
            k[slots.waits[ready]] = 0
        if slots.num_matched and not constrained:
            k[slots.matched[ready]] = 0
        return k if np.count_nonzero(k) else None

    def drafts(
        self, slots: np.ndarray, placed: np.ndarray, limit: np.ndarray, order: np.ndarray, room: int
    ) -> np.ndarray:
        """int32 [n]; the drafts of each slot in the step that is being planned.

        Args:
            slots: int [n]; that compute one token.
            placed, limit: int [n]; tokens known or placed, and the most there may be. One token comes without drafts.
            order: int [n]; of admission.
            room: tokens of the budget for all drafts.
        """
        k = np.minimum(self._k[slots], limit - placed - 1)
        k[placed < self._probe_at[slots]] = 0
        if np.add.reduce(k) > room:
            first = np.argsort(order)
            before = np.cumsum(k[first]) - k[first]
            k[first] = np.clip(room - before, 0, k[first])
        return k

    def learn(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What became of the drafts of a step.

        slots: int [n]; known: int [n], tokens known after it; drafted, accepted: int [n].
        """
        self.num_drafts += int(np.add.reduce(drafted))
        self.num_accepted += int(np.add.reduce(accepted))
        if not self.adaptive:
            return
        k = np.where((accepted == drafted) & (accepted > 0), 2 * self._k[slots], accepted + 1)
        self._k[slots] = np.minimum(np.maximum(k, self.least), self.num_tokens)
        hit = slots[accepted > 0]
        self._misses[hit] = 0
        self._pause[hit] = _FIRST_PAUSE
        missed = accepted == 0
        self._misses[slots[missed]] += 1
        missed &= self._misses[slots] >= _MISSES
        resting = slots[missed]
        self._probe_at[resting] = known[missed] + self._pause[resting]
        self._pause[resting] = np.minimum(2 * self._pause[resting], _LONGEST_PAUSE)
