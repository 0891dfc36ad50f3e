"""Any schedule of arrivals and aborts gives each request the tokens that it gets alone, and all comes back."""

from __future__ import annotations

from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Schedule, run_schedule, schedules


@given(schedule=schedules(VOCAB), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=150, deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    core, executor = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}")
    event(f"prefix hits: {core.stats().prefix_hits > 0}")
    event(f"placeholders: {executor.num_placeholders > 0}")
    assert executor.most_in_flight <= schedule.settings.in_flight
    if schedule.settings.in_flight == 1:
        assert executor.num_placeholders == 0
