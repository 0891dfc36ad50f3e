"""The steps of the memory profile: what a runner may be given one after the other."""

from __future__ import annotations

import pytest

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine_kit.memory_profile import steps_to_profile


@pytest.mark.parametrize("num_drafts", [None, 3])
def test_nobody_enters_a_slot_that_another_has(num_drafts: int | None) -> None:
    """Drafters keep things by slot, and are told first who leaves it. In the end they keep nothing."""
    start = launch(EngineConfig(model="tiny", max_num_seqs=4)).start.worker
    held: set[int] = set()
    for step in steps_to_profile(start, num_drafts):
        held -= set() if step.left_slots is None else set(step.left_slots.slot.tolist())
        entered = {new.slot for new in step.new_slots}
        assert not entered & held
        held |= entered
        assert set(step.slot_of_row.tolist()) <= held
    assert not held or num_drafts is None
