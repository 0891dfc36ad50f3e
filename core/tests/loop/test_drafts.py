"""Drafts change how fast tokens come, and nothing else: right ones, wrong ones, in any schedule."""

from __future__ import annotations

from dataclasses import replace

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Planned, Schedule, Settings, run_schedule, schedules

from engine.types.params import SamplingParams


@given(schedule=schedules(VOCAB, drafters=drafting.KINDS), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=300, deadline=None)
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
    assert 4 < drafts <= 4 + 1 + 5, "four, then one, then a probe after 4, 8, 16, 32, 64 tokens"
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
    assert core.scheduler.slots.computed[slot] == 5  # 13, less 3 decodes: 10, of which drafts take half
