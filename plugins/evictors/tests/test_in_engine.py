"""Any schedule of requests gets the tokens that each request gets alone, with `prefix` in the place of `lru`."""

from __future__ import annotations

from dataclasses import replace

from cores import LAYOUTS, make_core
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Schedule, examples, run_schedule, schedules

from engine.interfaces.context import CoreContext
from engine_evictors.prefix.body import Prefix
from engine_evictors.prefix.card import PrefixOptions


class WithOptions(Prefix):
    """As the engine builds it when the user sets no option."""

    def __init__(self, context: CoreContext) -> None:
        super().__init__(replace(context, options=PrefixOptions()))


@given(schedule=schedules(VOCAB), layout=st.sampled_from(sorted(LAYOUTS)))
@hypothesis_settings(max_examples=examples(30), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    core, _ = make_core(LAYOUTS[layout], schedule.settings, evictor=WithOptions)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
