"""What a row leaves in the prefix cache whose logits are not numbers: nothing, whenever that is told."""

from __future__ import annotations

import numpy as np
import pytest
from cores import LAYOUTS
from steps import finish, make_scheduler, plan, request

from engine.kv.hashing import root_hash
from engine.kv.matching import Sequence
from engine.scheduling.scheduler import Scheduler
from engine.types.outputs import CoreOutput
from engine.types.plan import BROKEN, StepResult

layouts = pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"state", "full and state", "all kinds"}))


def break_rows(scheduler: Scheduler) -> list[CoreOutput]:
    """The oldest outstanding plan comes back, and none of its rows that draw has numbers."""
    made = scheduler.outstanding[0]
    tokens = np.where(made.samples, BROKEN, -1).astype(np.int32)
    if made.num_drafts is not None:
        tokens = np.stack([tokens, np.full_like(tokens, -1)], axis=1)
    result = StepResult(step_id=made.step_id, tokens=tokens, num_drafts=made.num_drafts)
    outputs = scheduler.update(result) + scheduler.take_notices()
    scheduler.check_integrity()
    return outputs


def check_nothing_is_found(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    assert len(kv.index) == 0 and not kv.pool.committed.any()
    assert not any(kv.blocks.tail_hash) or scheduler.running
    while scheduler.outstanding:
        break_rows(scheduler)
    assert len(kv.index) == 0 and kv.pool.num_held == 0


@layouts
@pytest.mark.parametrize("budget", [32, 7])
def test_a_prompt(layout: str, budget: int) -> None:
    """In one step and in several, with a partly filled last block."""
    scheduler = make_scheduler(LAYOUTS[layout], max_num_batched_tokens=budget)
    scheduler.add(request("a", 21))
    while not plan(scheduler).samples.any():
        finish(scheduler)
    assert len(scheduler.kv.index), "nothing was there to be forgotten"
    (output,) = break_rows(scheduler)
    assert output.error is not None and output.error[0] == "invalid_logits"
    check_nothing_is_found(scheduler)


@layouts
def test_a_later_step_under_way(layout: str) -> None:
    scheduler = make_scheduler(LAYOUTS[layout])
    scheduler.add(request("a", 19))
    for _ in range(3):
        plan(scheduler)
    break_rows(scheduler)
    check_nothing_is_found(scheduler)


@layouts
def test_a_decode(layout: str) -> None:
    """The prompt and the tokens before, too: nobody knows what the row read that was no number."""
    scheduler = make_scheduler(LAYOUTS[layout])
    scheduler.add(request("a", 6, max_tokens=20))
    for _ in range(9):
        plan(scheduler)
        finish(scheduler)
    plan(scheduler)
    plan(scheduler)
    break_rows(scheduler)
    check_nothing_is_found(scheduler)


@layouts
def test_what_it_found_in_the_cache(layout: str) -> None:
    """Where that was spoilt, each request that shares it would end so."""
    scheduler = make_scheduler(LAYOUTS[layout])
    scheduler.add(request("a", 21, max_tokens=1))
    plan(scheduler)
    finish(scheduler)
    held = len(scheduler.kv.index)
    scheduler.add(request("b", 23))
    assert int(plan(scheduler).num_computed[0]) >= 18
    break_rows(scheduler)
    assert held and not scheduler.requests
    check_nothing_is_found(scheduler)


@layouts
def test_who_shares_its_pages_goes_on(layout: str) -> None:
    """And whoever comes then computes the same tokens anew."""
    scheduler = make_scheduler(LAYOUTS[layout], max_num_batched_tokens=64)
    scheduler.add(request("a", [*range(18), 99], max_tokens=3))
    scheduler.add(request("b", [*range(18), 98], max_tokens=3))
    made = plan(scheduler)
    slot = scheduler.requests["a"].slot
    tokens = np.where(made.slot_of_row == slot, BROKEN, 5).astype(np.int32)
    scheduler.update(StepResult(step_id=made.step_id, tokens=tokens))
    scheduler.check_integrity()
    assert list(scheduler.requests) == ["b"]
    kv, shared = scheduler.kv, np.arange(18, dtype=np.int32)
    assert kv.match(Sequence([], root_hash(None), shared), 17).num_tokens == 0
    for _ in range(2):
        plan(scheduler)
        finish(scheduler)
    assert not scheduler.requests and kv.pool.num_held == 0
    for _ in range(2):
        scheduler.add(request("c", [*range(18), 97], max_tokens=1))
        plan(scheduler)
        finish(scheduler)
    whole = 17 // kv.block_size * kv.block_size
    assert kv.match(Sequence([], root_hash(None), shared), 17).num_tokens >= min(16, whole)


@layouts
@pytest.mark.parametrize("how", ["aborted", "preempted", "swapped"])
def test_told_when_it_is_gone(layout: str, how: str) -> None:
    """What it left when its pages were given back goes too, its partly filled last block included."""
    scheduler = make_scheduler(LAYOUTS[layout], swap_pages=100 if how == "swapped" else 0)
    scheduler.add(request("a", 18))
    plan(scheduler)
    finish(scheduler)
    plan(scheduler)
    plan(scheduler)
    if how == "aborted":
        scheduler.abort(["a"])
    else:
        scheduler.states.preempt(scheduler.requests["a"])
    assert len(scheduler.kv.index)
    break_rows(scheduler)
    assert not scheduler.requests
    check_nothing_is_found(scheduler)


@layouts
def test_siblings(layout: str) -> None:
    """They enter the step that computes the prompt, or a later one."""
    scheduler = make_scheduler(LAYOUTS[layout])
    for name in "abc":
        scheduler.add(request(name, 21, parent="p"))
    plan(scheduler)
    plan(scheduler)
    break_rows(scheduler)
    check_nothing_is_found(scheduler)
    while scheduler.requests:
        if scheduler.schedule() is not None or scheduler.outstanding:
            break_rows(scheduler)
    check_nothing_is_found(scheduler)


@layouts
def test_drafts(layout: str) -> None:
    scheduler = make_scheduler(LAYOUTS[layout], drafter="right", num_drafts=3, adaptive=False)
    scheduler.add(request("a", 18, max_tokens=20))
    plan(scheduler)
    finish(scheduler)
    assert plan(scheduler).num_drafts is not None
    break_rows(scheduler)
    check_nothing_is_found(scheduler)
