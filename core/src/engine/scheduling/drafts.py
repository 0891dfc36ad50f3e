"""Which decodes compute drafts in a step, how many, and where these come from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from engine.scheduling.constraints import Constraints
    from engine.scheduling.jump_ahead import JumpAhead
    from engine.scheduling.slots import SlotTable
    from engine.scheduling.speculation import Speculation


class ChosenDrafts(NamedTuple):
    """The drafts of decodes.

    Args:
        counts: int32 [n]; None for none at all.
        given: by the decode's place: tokens that a constraint forces. The other rows' are the drafter's.
    """

    counts: np.ndarray | None
    given: Mapping[int, list[int]]


NO_DRAFTS = ChosenDrafts(None, MappingProxyType({}))


def choose_drafts(
    ready: np.ndarray,
    slots: SlotTable,
    room: int,
    shared: bool,
    speculation: Speculation | None,
    jump_ahead: JumpAhead | None,
    constraints: Constraints | None,
) -> ChosenDrafts:
    """Rows jump ahead where they can, others are drafted for.

    Args:
        ready: int [n]; slots that compute one token.
        room: tokens that the decodes leave of the budget.
        shared: prompts wait, and get half of it.
        speculation, jump_ahead, constraints: None where there are none.
    """
    if speculation is None and jump_ahead is None:
        return NO_DRAFTS
    room = room // 2 if shared else room
    given: dict[int, list[int]] = {}
    if jump_ahead is not None and slots.num_matched:
        given = jump_ahead.choose(ready, slots, room)
        room -= sum(map(len, given.values()))
    counts = None
    if speculation is not None:
        counts = speculation.choose(ready, slots, room, constraints is not None and constraints.takes_drafts)
    if given:
        counts = np.zeros(ready.size, np.int32) if counts is None else counts
        counts[list(given)] = [len(tokens) for tokens in given.values()]
    return ChosenDrafts(counts, given)
