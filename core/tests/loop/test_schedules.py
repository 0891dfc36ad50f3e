"""Any schedule of arrivals and aborts gives each request the tokens that it gets alone, and all comes back."""

from __future__ import annotations

from dataclasses import replace

import drafting
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Schedule, examples, run_schedule, schedules


@given(schedule=schedules(VOCAB), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    core, executor = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"swapped: {min(core.stats().num_swap_preemptions, 3)}, found no room: {core.stats().num_swap_full > 0}")
    event(f"prefix hits: {core.stats().prefix_hits > 0}")
    event(f"placeholders: {executor.num_placeholders > 0}")
    assert executor.most_in_flight <= schedule.settings.in_flight
    if schedule.settings.in_flight == 1:
        assert executor.num_placeholders == 0


@given(schedule=schedules(VOCAB, crowded=True), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_preempted_requests_get_the_tokens_that_they_get_alone(schedule: Schedule, layout: str) -> None:
    core, executor = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    stats = core.stats()
    event(f"preemptions: {min(stats.num_preemptions, 3)}")
    event(f"swapped: {min(stats.num_swap_preemptions, 3)}, found no room: {stats.num_swap_full > 0}")
    event(f"placeholders: {executor.num_placeholders > 0}")
    assert stats.swap_pages_used == 0


@given(
    schedule=schedules(VOCAB, crowded=True, drafters=("", "", *drafting.KINDS)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    share=st.sampled_from([1.0, 0.3]),
)
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_what_cannot_be_loaded_is_computed_again(schedule: Schedule, layout: str, share: float) -> None:
    settings = replace(schedule.settings, swap_pages=100, failing_loads=share)
    core, executor = make_core(LAYOUTS[layout], settings)
    outcomes = run_schedule(core, replace(schedule, settings=settings))
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    event(f"swapped: {core.stats().num_swap_preemptions > 0}, failed: {executor.worker.num_failed > 0}")
