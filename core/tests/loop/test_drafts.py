"""Drafts change how fast tokens come, and nothing else: right ones, wrong ones, in any schedule."""

from __future__ import annotations

from dataclasses import replace

import drafting
import msgspec
import numpy as np
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Planned, Schedule, Settings, examples, run_schedule, schedules

from engine.process import wire
from engine.scheduling.slots import DECODE
from engine.types.errors import ContractError
from engine.types.params import SamplingParams
from engine.types.plan import GivenDrafts, StepPlan, StepResult


@given(schedule=schedules(VOCAB, drafters=drafting.KINDS), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=examples(30), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    core, executor = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    stats = core.stats()
    assert 0 <= stats.num_accepted_drafts <= stats.num_drafts
    if schedule.settings.drafter == "wrong":
        assert stats.num_accepted_drafts == 0
    event(f"preemptions: {min(stats.num_preemptions, 3)}")
    event(f"drafts: {stats.num_drafts > 0}, accepted: {stats.num_accepted_drafts > 0}")
    event(f"placeholders: {executor.num_placeholders > 0}")


ROOMY = Settings(
    num_pages=200, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, in_flight=2,
    enable_prefix_caching=True, num_drafts=4,
)  # fmt: skip
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, seed=0)


def steps_for(settings: Settings, requests: int = 1) -> tuple[int, int, int]:
    """(steps, drafts, accepted) of requests of 120 tokens each."""
    core, executor = make_core(LAYOUTS["full and sliding"], settings)
    planned = tuple(Planned(request_id=f"r{i}", prompt=(1, 2, 3 + i), params=LONG) for i in range(requests))
    outcomes = run_schedule(core, Schedule(settings=settings, requests=planned))
    for request in planned:
        check_outcome(core, request, outcomes[request.request_id])
        assert len(outcomes[request.request_id].tokens) == 120
    stats = core.stats()
    return executor.worker.num_steps, stats.num_drafts, stats.num_accepted_drafts


@pytest.mark.parametrize("in_flight", [1, 2])
def test_right_drafts_give_five_tokens_a_step(in_flight: int) -> None:
    steps, drafts, accepted = steps_for(replace(ROOMY, drafter="right", in_flight=in_flight))
    assert steps == 1 + 24  # the prompt, which gives one token; 119 others by fives
    assert drafts == accepted == 119 - 24


def test_wrong_drafts_are_given_up_and_probed_for() -> None:
    steps, drafts, accepted = steps_for(replace(ROOMY, drafter="wrong"))
    assert steps == 120 and accepted == 0
    assert 4 < drafts < 30, "fewer and fewer, then a probe after 4, 8, 16, 32, 64 tokens"
    _, drafts, _ = steps_for(replace(ROOMY, drafter="wrong", adaptive=False))
    assert drafts > 400, "without the rule each step has its four"


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    """Three requests decode with drafts; a long prompt that arrives is computed beside them."""
    settings = replace(ROOMY, drafter="wrong", adaptive=False, max_num_batched_tokens=13, in_flight=1)
    core, _ = make_core(LAYOUTS["full"], settings)
    for i in range(3):
        core.add_request(Planned(request_id=f"r{i}", prompt=(1, 2, 3 + i), params=LONG).to_request())
    for _ in range(3):
        core.step()
    core.add_request(Planned(request_id="late", prompt=tuple(range(1, 13)) * 5, params=LONG).to_request())
    core.step()
    assert core.stats().num_running == 4
    slot = core.scheduler.running["late"].slot
    assert core.scheduler.slots.computed[slot] == 3 + 5  # 3 found; 13, less 3 decodes: 10, of which drafts take half


def test_more_requests_decode_than_the_budget_holds() -> None:
    """While one waits for its drafts, others begin; back together they are too many, and take turns."""
    settings = replace(ROOMY, drafter="right", adaptive=False, max_num_batched_tokens=3, max_num_seqs=6)
    core, _ = make_core(LAYOUTS["full"], settings)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=0)
    planned = tuple(Planned(request_id=f"r{i}", prompt=(i,), params=params, arrives=2 * i) for i in range(6))
    most, schedule = 0, core.scheduler.schedule

    def watched() -> object:
        nonlocal most
        slots = core.scheduler.slots
        most = max(most, int(((slots.phase == DECODE) & (slots.drafts == 0) & (slots.placed < slots.limit)).sum()))
        return schedule()

    core.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    outcomes = run_schedule(core, Schedule(settings=settings, requests=planned))
    for request in planned:
        check_outcome(core, request, outcomes[request.request_id])
    assert most > 3


def test_pages_of_drafts_under_way_come_back_before_anybody_is_preempted() -> None:
    settings = replace(ROOMY, drafter="wrong", num_pages=1 + 13, max_num_seqs=2, enable_prefix_caching=False)
    scheduler = make_core(LAYOUTS["full, blocks of 1"], settings)[0].scheduler

    def result(step_id: int, tokens: list[list[int]], num_drafts: list[int] | None) -> StepResult:
        drafts = None if num_drafts is None else np.array(num_drafts, np.int32)
        return StepResult(step_id=step_id, tokens=np.array(tokens, np.int32), num_drafts=drafts)

    scheduler.add(Planned(request_id="r0", prompt=(1, 2, 3, 4), params=LONG).to_request())
    assert scheduler.schedule() is not None
    scheduler.update(result(1, [[5]], None))
    scheduler.add(Planned(request_id="r1", prompt=(1, 2, 3, 4), params=LONG).to_request())
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens.tolist() == [4, 5] and plan.num_drafts is not None
    assert plan.num_drafts.tolist() == [0, 4] and scheduler.kv.pool.num_available == 0
    assert scheduler.schedule() is None, "r1 has no page for its next token, and waits for those of r0's drafts"
    (_, news) = scheduler.update(result(2, [[5, -1, -1, -1, -1], [5, 6, -1, -1, -1]], [0, 4]))
    assert (news.request_id, news.new_token_ids) == ("r0", [5, 6])
    assert scheduler.num_preemptions == 0 and scheduler.kv.pool.num_available == 3
    assert scheduler.slots.computed.tolist() == [6, 4]
    scheduler.check_integrity()
    plan = scheduler.schedule()
    assert plan is not None and sorted(plan.slot_of_row.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "num_drafts"),
    [
        ([[5, 6, 7, 8, 9]], [3]),  # more than there were drafts
        ([[5, 6, 7, 8, 9]], [5]),  # more drafts than were asked for
        ([[5, -1, 7]], [4]),  # a hole
        ([[-1, 5, 6]], [4]),
        ([[5, 6]], None),
    ],
)
def test_a_result_that_does_not_fit_is_the_workers_fault(tokens: list[list[int]], num_drafts: list[int] | None) -> None:
    scheduler = make_core(LAYOUTS["full"], replace(ROOMY, drafter="wrong"))[0].scheduler
    scheduler.add(Planned(request_id="r0", prompt=(1, 2), params=LONG).to_request())
    assert scheduler.schedule() is not None
    scheduler.update(StepResult(step_id=1, tokens=np.array([5], np.int32)))
    plan = scheduler.schedule()
    assert plan is not None and plan.num_drafts is not None and plan.num_drafts.tolist() == [4]
    drafts = None if num_drafts is None else np.array(num_drafts, np.int32)
    with pytest.raises(ContractError):
        scheduler.update(StepResult(step_id=2, tokens=np.array(tokens, np.int32), num_drafts=drafts))


def test_plans_and_results_travel() -> None:
    scheduler = make_core(LAYOUTS["full"], replace(ROOMY, drafter="wrong"))[0].scheduler
    scheduler.add(Planned(request_id="r0", prompt=(1, 2), params=LONG).to_request())
    for step_id in (1, 2):
        plan = scheduler.schedule()
        there = wire.decoder(StepPlan).decode(wire.encode(plan))
        if step_id == 1:
            assert there.num_drafts is None
            scheduler.update(StepResult(step_id=1, tokens=np.array([5], np.int32)))
    assert there.num_drafts.tolist() == [4]
    tokens = np.array([[5, 6, -1], [7, 8, 9]], np.int32)
    given = GivenDrafts(row=np.array([0, 2], np.int32), tokens=tokens)
    there = wire.decoder(StepPlan).decode(wire.encode(msgspec.structs.replace(plan, given_drafts=given)))
    assert there.given_drafts.row.tolist() == [0, 2] and (there.given_drafts.tokens == tokens).all()
    sent = StepResult(step_id=2, tokens=np.array([[5, 6]], np.int32), num_drafts=np.array([4], np.int32))
    back = wire.decoder(StepResult).decode(wire.encode(sent))
    assert back.tokens.tolist() == [[5, 6]] and back.num_drafts.tolist() == [4]
