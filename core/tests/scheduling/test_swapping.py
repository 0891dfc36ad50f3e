"""Preemption by swap, step by step: what is copied, who comes back when, and what is given back."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from cores import LAYOUTS
from steps import finish, make_scheduler, plan, request, rows, run

from engine.kv.matching import Sequence
from engine.process import wire
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.slots import Status
from engine.types.plan import StepPlan, StepResult
from engine_reference.connector_host.scheduler_half import Copies


def copies(made: StepPlan) -> Copies | None:
    if made.sections is None:
        return None
    decoded: Copies = wire.decoder(Copies).decode(made.sections["host"])
    return decoded


def used(scheduler: Scheduler) -> int:
    assert scheduler.swapping is not None
    return scheduler.swapping.connector.half.usage().used


def swapped_out(**changes: int) -> tuple[Scheduler, StepPlan]:
    """a and b wanted a page each and there was none: b is swapped out, by the plan that is returned."""
    scheduler = make_scheduler(**{"num_pages": 7, "swap_pages": 8, **changes})  # 6 pages of 4 tokens
    scheduler.add(request("a", [1] * 12, max_tokens=10))
    scheduler.add(request("b", [2] * 12, max_tokens=10))
    plan(scheduler)
    finish(scheduler)
    return scheduler, plan(scheduler)


def test_pages_are_copied_out_by_the_plan_that_may_overwrite_them() -> None:
    scheduler, made = swapped_out()
    done = copies(made)
    assert done is not None and done.out_page.size == 3 and not done.in_page.size
    assert rows(made) == [(0, 12, 1, True)] and scheduler.num_swapped == 1
    assert scheduler.requests["b"].status is Status.SWAPPED and used(scheduler) == 3
    assert (scheduler.num_preemptions, scheduler.states.preemptions.num_swapped) == (1, 1)


def test_it_comes_back_before_anybody_new_and_goes_on_where_it_was() -> None:
    scheduler, _ = swapped_out(enable_prefix_caching=False)
    scheduler.add(request("new", [3], max_tokens=1))
    while "a" in scheduler.requests:
        finish(scheduler)
        made = plan(scheduler) if "a" in scheduler.requests else None
        assert made is None or made.num_rows == 1, "there would be a page for the new one, but b was first"
    made = plan(scheduler)
    done = copies(made)
    assert [new.request_id for new in made.new_slots] == ["b", "new"]
    assert rows(made)[:1] == [(made.new_slots[0].slot, 12, 1, True)], "one token to compute, twelve were loaded"
    assert done is not None and done.in_page.size == 3 and scheduler.num_swapped == 0
    assert made.new_slots[0].token_ids.tolist() == [*[2] * 12, 7]
    run_out = run(scheduler)
    assert used(scheduler) == 0 and {o.request_id for o in run_out if o.finish_reason} == {"b", "new"}


def test_what_the_cache_still_has_is_not_loaded() -> None:
    scheduler, made = swapped_out(num_pages=9, max_num_seqs=2)  # a grows to 6 pages: of b's some stay in the cache
    done = copies(made)
    while done is None:
        finish(scheduler)
        made = plan(scheduler)
        done = copies(made)
    out = done.out_page.size
    while scheduler.num_swapped:
        finish(scheduler)
        made = plan(scheduler)
    done = copies(made)
    assert done is not None and 0 < done.in_page.size < out
    run(scheduler)


def test_a_reset_of_the_cache_while_swapped() -> None:
    """Nothing is looked for in the new cache, and what is loaded does not enter it."""
    scheduler, made = swapped_out()
    scheduler.kv.reset_prefix_cache()
    while scheduler.num_swapped:
        finish(scheduler)
        made = plan(scheduler)
    done = copies(made)
    assert done is not None and done.in_page.size == 3
    run(scheduler)
    assert not len(scheduler.kv.index)


@pytest.mark.parametrize("reset", [False, True])
def test_abort_while_swapped(reset: bool) -> None:
    scheduler, _ = swapped_out()
    scheduler.abort(["b"])
    assert scheduler.num_swapped == 0
    if reset:
        scheduler.kv.reset_prefix_cache()
    run(scheduler)
    scheduler.check_integrity()
    assert used(scheduler) == 0


def test_abort_while_draining_gives_the_places_back() -> None:
    scheduler = make_scheduler(num_pages=5, swap_pages=10)
    scheduler.add(request("a", [1] * 8))
    scheduler.add(request("b", [2] * 7))
    plan(scheduler)
    assert scheduler.schedule() is None and scheduler.requests["b"].status is Status.DRAINING and used(scheduler) == 2
    scheduler.abort(["b"])
    finish(scheduler)
    scheduler.check_integrity()
    plan(scheduler)
    assert used(scheduler) == 0


def test_tokens_that_return_while_it_drains_are_kept() -> None:
    scheduler = make_scheduler(num_pages=5, swap_pages=10)
    scheduler.add(request("a", [1] * 8))
    scheduler.add(request("b", [2] * 7))
    plan(scheduler)
    assert scheduler.schedule() is None
    finish(scheduler)
    b = scheduler.requests["b"]
    assert b.status is Status.SWAPPED and b.token_ids.tolist() == [*[2] * 7, 7]


def test_a_deadline_while_swapped() -> None:
    scheduler, _ = swapped_out()
    b = scheduler.requests["b"]
    b.timeout = 0.0
    scheduler.states.deadlines.add(b, 0.0)
    scheduler.schedule()
    (late,) = scheduler.take_notices()
    assert late.error is not None and late.error[0] == "request_timeout"
    run(scheduler)
    assert used(scheduler) == 0


def test_a_full_swap_space_falls_back_to_recompute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scheduler, made = swapped_out(swap_pages=2)
    assert copies(made) is None and scheduler.requests["b"].status is Status.WAITING
    counts = scheduler.states.preemptions
    assert (counts.num_swapped, counts.num_recomputed, counts.num_swap_full) == (0, 1, 1)
    assert "request b is preempted by mode recompute" in caplog.text and "the swap space is full" in caplog.text
    ends = [output.request_id for output in run(scheduler) if output.finish_reason is not None]
    assert ends == ["a", "b"] and used(scheduler) == 0


def test_a_swapped_request_that_outgrows_the_cache_ends_with_a_typed_error() -> None:
    scheduler = make_scheduler(num_pages=5, swap_pages=20)
    scheduler.add(request("a", [1] * 8, max_tokens=3))
    scheduler.add(request("b", [2] * 8, max_tokens=50))
    ends = {output.request_id: output for output in run(scheduler) if output.finish_reason is not None}
    assert ends["a"].error is None and ends["b"].error is not None and ends["b"].error[0] == "kv_cache_too_small"
    assert used(scheduler) == 0


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_only_what_a_window_still_sees_is_kept(layout: str) -> None:
    scheduler = make_scheduler(LAYOUTS[layout], num_pages=120, swap_pages=200, max_num_seqs=2)
    scheduler.add(request("a", [1] * 25, max_tokens=30))
    scheduler.add(request("b", [2] * 25, max_tokens=30))
    plan(scheduler)
    finish(scheduler)
    kv, b = scheduler.kv, scheduler.requests["b"]
    computed = int(scheduler.slots.computed[b.slot])
    wanted = sum(t.blocks(computed) - t.first_needed(computed) for t in kv.tables)
    scheduler.states.preempt(b)
    assert used(scheduler) == wanted
    done = copies(plan(scheduler))  # it comes back at once: there is room
    assert done is not None and done.out_page.size == wanted
    run(scheduler)


def test_the_warning_comes_first_and_then_every_fiftieth_time(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler()
    with caplog.at_level(logging.WARNING):
        for i in range(101):
            scheduler.states.preemptions.count(f"r{i}", swapped=bool(i % 2))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and "Cumulative preemptions: 1" in told[0] and told[1].endswith(": 51")
    assert "by mode recompute" in told[0]


def test_places_are_not_filled_anew_by_the_plan_that_reads_them() -> None:
    scheduler, _ = swapped_out()
    assert scheduler.swapping is not None
    connector = scheduler.swapping.connector.half
    total = connector.usage().total
    connector.swap_in("b", np.arange(3, dtype=np.int32), np.array([1, 2, 3], np.int32))
    assert connector.swap_out("x", np.arange(1, total - 2, dtype=np.int32))
    assert not connector.swap_out("y", np.array([4], np.int32)), "b's places are read by this very plan"
    connector.plan_section()
    assert connector.swap_out("y", np.array([4], np.int32))


def test_a_failed_load_costs_what_chains_on_it() -> None:
    """Of the request whose load failed nothing is found from there on; what others computed stays, and is found."""
    scheduler, made = swapped_out(num_pages=9, max_num_seqs=2)
    while (done := copies(made)) is None or not done.in_page.size:
        finish(scheduler)
        made = plan(scheduler)
    kv, b = scheduler.kv, scheduler.requests["b"]
    before = kv.num_resets
    while scheduler.outstanding[0] is not made:
        finish(scheduler)
    tokens = np.where(made.samples, 7, -1).astype(np.int32)
    scheduler.update(StepResult(step_id=made.step_id, tokens=tokens, news={"host": [done.in_page[:1].tobytes()]}))
    scheduler.check_integrity()
    assert kv.num_resets == before

    def found(tokens: list[int]) -> int:
        return kv.match(Sequence([], b.root, np.array(tokens, np.int32)), len(tokens)).num_tokens

    assert found([1] * 12) == 12 and found([2] * 12) < 12
    outputs = [output for output in run(scheduler) if output.request_id == "b"]
    assert outputs[-1].finish_reason is not None and found([2] * 12) == 12


def test_what_is_loaded_is_nobody_elses_before_its_result_is_there() -> None:
    """So what fails has spoilt nobody else, nor what somebody has cached who has left meanwhile."""
    scheduler = make_scheduler(swap_pages=50)
    scheduler.add(request("b", [2] * 13))
    plan(scheduler)
    finish(scheduler)
    scheduler.states.preempt(scheduler.requests["b"])
    made = plan(scheduler)
    done = copies(made)
    assert done is not None and done.in_page.size == 1
    scheduler.add(request("c", [*[2] * 13, 3, 3, 3, 3]))
    then = plan(scheduler)
    assert [new.request_id for new in then.new_slots] == ["c"]
    named = [pages.page for pages in then.new_blocks] + [[] if then.copies is None else then.copies.source]
    assert not np.isin(np.concatenate(named), done.in_page).any()
    scheduler.abort(["c"])
    scheduler.add(request("c", [5] * 4))
    before = scheduler.kv.num_resets
    tokens = np.where(made.samples, 7, -1).astype(np.int32)
    scheduler.update(StepResult(step_id=made.step_id, tokens=tokens, news={"host": [done.in_page.tobytes()]}))
    assert scheduler.kv.num_resets == before
    run(scheduler)


def test_a_load_that_is_refused_costs_nobody_else_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody shares in a step what is computed there from what is loaded for it."""
    scheduler = make_scheduler(swap_pages=50, max_num_batched_tokens=22)
    scheduler.add(request("a", [2] * 30))
    plan(scheduler)
    finish(scheduler)
    scheduler.states.preempt(scheduler.requests["a"])
    scheduler.add(request("b", [2] * 30))
    assert scheduler.swapping is not None

    def swap_in(*args: object) -> None:
        raise RuntimeError("it is gone")

    monkeypatch.setattr(scheduler.swapping.connector.half, "swap_in", swap_in)
    made = plan(scheduler)
    assert [new.request_id for new in made.new_slots] == ["a", "b"] and list(scheduler.requests) == ["b"]
    of_b = made.slot_of_row.tolist().index(scheduler.requests["b"].slot)
    assert made.num_computed[of_b] <= 22, "it takes for computed what nobody has loaded"
    ends = [output for output in run(scheduler) if output.finish_reason is not None]
    assert [(end.request_id, end.error is None) for end in ends] == [("a", False), ("b", True)]
    assert used(scheduler) == 0


@pytest.mark.parametrize("before", [True, False])
def test_what_a_tier_has_kept_when_it_raises_is_given_back(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(swap_pages=50)
    scheduler.add(request("a"))
    scheduler.add(request("b", 7))
    plan(scheduler)
    finish(scheduler)
    assert scheduler.swapping is not None
    connector = scheduler.swapping.connector.half
    keep = connector.swap_out

    def swap_out(*args: Any) -> bool:
        assert before or keep(*args)
        raise RuntimeError("no more")

    monkeypatch.setattr(connector, "swap_out", swap_out)
    scheduler.states.preempt(scheduler.requests["b"])
    ends = {output.request_id: output for output in run(scheduler) if output.finish_reason is not None}
    assert "no more" in str(ends["b"].error) and ends["a"].error is None
    assert scheduler.states.preemptions.num_swap_full == 0
    assert connector.usage().used == 0 and used(scheduler) == 0
    scheduler.check_integrity()


def test_a_queue_that_raises_over_a_swapped_request_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(swap_pages=50)
    scheduler.add(request("a"))
    scheduler.add(request("b", 7))
    plan(scheduler)
    finish(scheduler)
    assert scheduler.swapping is not None

    def push_front(*args: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(scheduler.swapping.queue, "push_front", push_front)
    scheduler.states.preempt(scheduler.requests["b"])
    (notice,) = scheduler.take_notices()
    assert notice.request_id == "b" and notice.error is not None and "no room" in str(notice.error)
    scheduler.check_integrity()
    assert {output.request_id for output in run(scheduler)} == {"a"} and used(scheduler) == 0
