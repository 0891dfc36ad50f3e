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
from engine.types.plan import StepPlan


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
        forced: by the decode's place: tokens that a constraint forces. The other rows' are the drafter's.
    """

    counts: np.ndarray | None
    forced: Mapping[int, list[int]]


NO_DRAFTS = ChosenDrafts(None, MappingProxyType({}))


class DraftSources:
    """Both sources.

    Args:
        speculation: how many the drafter is asked for; None where there is no drafter.
        jump_forward: over what constraints force; None: token by token.
        constraints: None where there is no grammar driver.
    """

    def __init__(
        self, speculation: Speculation | None, jump_forward: JumpForward | None, constraints: Constraints | None
    ) -> None:
        self.speculation = speculation
        self.jump_forward = jump_forward
        self._constraints = constraints

    @property
    def possible(self) -> bool:
        """Whether a row may have any."""
        return self.speculation is not None or self.jump_forward is not None

    def enter(self, slot: int) -> None:
        """A request enters this slot: nothing is known of it."""
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
                counts[slots.waits[ready]] = 0
            if slots.num_matched and not (self._constraints is not None and self._constraints.takes_drafts):
                counts[slots.matched[ready]] = 0
        if forced:
            counts = np.zeros(ready.size, np.int32) if counts is None else counts
            counts[list(forced)] = [len(tokens) for tokens in forced.values()]
        return ChosenDrafts(counts, forced) if counts is not None and np.count_nonzero(counts) else NO_DRAFTS

    def tried(self, plan: StepPlan, rows: np.ndarray) -> list[tuple[Speculation, np.ndarray]]:
        """Which of these rows, bool [n], had drafts of each source, and who learns from what became of them."""
        assert plan.num_drafts is not None
        tried, found = plan.num_drafts[rows] > 0, []
        if plan.forced_drafts is not None:
            assert self.jump_forward is not None
            forced = np.isin(rows, plan.forced_drafts.row)
            found.append((self.jump_forward.learned, tried & forced))
            tried = tried & ~forced
        if self.speculation is not None:
            found.append((self.speculation, tried))
        return found
