"""Where the drafts of decodes come from: some are forced by a constraint, the others are the drafter's.

How many the drafter is asked for, and over what rows jump, are parts outside the core (of ours `engine_kit.speculation`
and `engine_kit.jump_forward`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from engine.scheduling.slots import SlotTable
from engine.scheduling.structured import Constraints
from engine.types.plan import StepPlan, StepResult


class Speculation(Protocol):
    """How many drafts each request gets in its next step, by what became of those before."""

    num_rows: int
    num_drafts: int
    num_accepted: int
    accepted_at: np.ndarray

    def enter(self, slot: int) -> None: ...
    def drafts(self, ready: np.ndarray, slots: SlotTable, room: int) -> np.ndarray: ...
    def took(self, plan: StepPlan, found: np.ndarray | None, now: float) -> None: ...
    def learn(self, slots: np.ndarray, known: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None: ...


class JumpForward(Protocol):
    """Which rows jump, and over what."""

    learned: Speculation

    def enter(self, slot: int) -> None: ...
    def choose(self, ready: np.ndarray, slots: SlotTable, room: int) -> dict[int, list[int]]: ...
    def leave(self, slot: int, slots: SlotTable) -> None: ...


class ChosenDrafts(NamedTuple):
    """The drafts of decodes.

    Args:
        counts: int32 [n]; None for none at all.
        given: by the decode's place: tokens that come with the plan. For the other rows the drafter is asked.
    """

    counts: np.ndarray | None
    given: Mapping[int, list[int]]


NO_DRAFTS = ChosenDrafts(None, MappingProxyType({}))


class DraftSources:
    """Both sources.

    Args:
        speculation: how many the drafter is asked for; None where there is no drafter.
        jump_forward: over what constraints force; None: token by token.
        constraints: None where there is no grammar driver.
        early: the drafter proposes with the result of the step before, and the plan brings its drafts: of several
            pipeline stages the first could not know them otherwise.
    """

    def __init__(
        self,
        speculation: Speculation | None,
        jump_forward: JumpForward | None,
        constraints: Constraints | None,
        early: bool = False,
    ) -> None:
        self.speculation = speculation
        self.jump_forward = jump_forward
        self._constraints = constraints
        self._early = early
        self._proposed: dict[int, list[int]] = {}  # by slot, for its next step

    @property
    def possible(self) -> bool:
        """Whether a row may have any."""
        return self.speculation is not None or self.jump_forward is not None

    def enter(self, slot: int) -> None:
        """A request enters this slot: nothing is known of it."""
        self._proposed.pop(slot, None)
        if self.speculation is not None:
            self.speculation.enter(slot)
        if self.jump_forward is not None:
            self.jump_forward.enter(slot)

    def leave(self, slot: int, slots: SlotTable) -> None:
        """The slot's request ends."""
        if self.jump_forward is not None:
            self.jump_forward.leave(slot, slots)

    def choose(self, ready: np.ndarray, slots: SlotTable, room: int, shared: bool) -> ChosenDrafts:
        """Rows jump forward where they can, others are drafted for.

        Args:
            ready: int [n]; slots that compute one token.
            room: tokens that the decodes leave of the budget.
            shared: prompts wait, and get half of it.
        """
        if not self.possible:
            return NO_DRAFTS
        room = room // 2 if shared else room
        forced: dict[int, list[int]] = {}
        if self.jump_forward is not None and slots.num_matched:
            forced = self.jump_forward.choose(ready, slots, room)
            room -= sum(map(len, forced.values()))
        counts = None
        if self.speculation is not None:
            counts = self.speculation.drafts(ready, slots, room)
            if slots.num_waits:  # who reads tokens on the host has not seen the drafts before a position
                counts[[slots.request(slot).host_tokens for slot in ready.tolist()]] = 0
            if slots.num_matched and not (self._constraints is not None and self._constraints.takes_drafts):
                counts[slots.matched[ready]] = 0
        given = dict(forced)
        if self._early and counts is not None:
            found = [self._proposed.pop(slot, []) for slot in ready.tolist()]  # in the step after they are of no use
            given = {at: drafts[:k] for at, (drafts, k) in enumerate(zip(found, counts, strict=True))} | forced
            counts = np.zeros_like(counts)
        if given:
            counts = np.zeros(ready.size, np.int32) if counts is None else counts
            counts[list(given)] = [len(tokens) for tokens in given.values()]
            slots.proposed[ready] = True
            slots.proposed[ready[list(forced)]] = False
            forced = {at: tokens for at, tokens in given.items() if tokens}
        return ChosenDrafts(counts, forced) if counts is not None and np.count_nonzero(counts) else NO_DRAFTS

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """What the drafter proposes behind the draws of a step."""
        if (proposed := result.proposed) is None:
            return
        for slot, tokens in zip(plan.slot_of_row[proposed.row].tolist(), proposed.tokens.tolist(), strict=True):
            self._proposed[slot] = [token for token in tokens if token >= 0]

    def tried(self, plan: StepPlan, rows: np.ndarray) -> list[tuple[Speculation, np.ndarray]]:
        """Which of these rows, bool [n], had drafts of each source, and who learns from what became of them."""
        assert plan.num_drafts is not None
        tried, found = plan.num_drafts[rows] > 0, []
        if self.jump_forward is not None and (given := plan.given_drafts) is not None:
            assert given.proposed is not None
            forced = np.isin(rows, given.row[~given.proposed])
            found.append((self.jump_forward.learned, tried & forced))
            tried = tried & ~forced
        if self.speculation is not None:
            found.append((self.speculation, tried))
        return found
