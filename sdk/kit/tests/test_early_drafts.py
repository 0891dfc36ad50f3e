"""Drafts of several stages: how far the draft model may go behind a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.types.plan import StepPlan
from engine_kit.early_drafts import EarlyDrafts

BLOCK, LONGEST = 16, 40


def test_passes_stay_within_pages_and_positions() -> None:
    """All rows go as many passes as the one with the most room: what is behind a row's limit is computed in vain."""
    asked: list[Any] = []
    session: Any = SimpleNamespace(tokens=None, limit=np.zeros(4, np.int32))
    drafting: Any = SimpleNamespace(probs={}, rejects=False, proposed=asked.append)
    faults: Any = SimpleNamespace(among=lambda slots: None)
    layout = SimpleNamespace(block_size=BLOCK)
    start: Any = SimpleNamespace(max_model_len=LONGEST, layout=layout, drafts=("one",))
    num_computed = np.array([3, 14, 36, 38], np.int32)
    plan = StepPlan(
        step_id=0, slot_of_row=np.arange(4, dtype=np.int32), num_computed=num_computed,
        num_tokens=np.ones(4, np.int32), samples=np.ones(4, bool), num_decodes=4, new_slots=[], new_blocks=[],
    )  # fmt: skip
    step: Any = SimpleNamespace(plan=plan)
    assert EarlyDrafts(start, drafting, session, SimpleNamespace(), faults, 8).launched(step) is None
    assert session.limit.tolist() == [BLOCK, BLOCK, LONGEST, LONGEST]
    (rows,) = asked
    assert rows.slot.tolist() == [0, 1, 2] and rows.num_tokens.tolist() == [5, 16, 38]
    assert rows.num_drafts.tolist() == [8, 1, 2]
