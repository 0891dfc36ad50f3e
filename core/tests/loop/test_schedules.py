"""Any schedule of arrivals and aborts gives each request the tokens that it gets alone, and all comes back."""

from __future__ import annotations

from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from paged_worker import VOCAB, alone, logprob_entry
from schedules import Outcome, Planned, Schedule, run_schedule, schedules

from engine.loop.engine_core import EngineCore
from engine.types.params import SamplingParams


def check_outcome(core: EngineCore, request: Planned, outcome: Outcome) -> None:
    """The request got what it gets alone, as far as it came."""
    kv = core.scheduler.kv
    tokens, reason = alone(
        kv.layout, list(request.prompt), request.params, list(request.eos), core.scheduler.max_model_len
    )
    if outcome.finish_reason == "abort":
        assert request.aborted is not None
        assert outcome.tokens == tokens[: len(outcome.tokens)]
    elif outcome.finish_reason == "error":
        assert outcome.error is not None and outcome.error[0] == "kv_cache_too_small"
        assert outcome.tokens == tokens[: len(outcome.tokens)]
        assert not kv.fits_at_all(len(request.prompt) + len(tokens) - 1), "it would have fitted"
    else:
        assert (outcome.tokens, outcome.finish_reason) == (tokens, reason)
        if reason == "stop":
            last = None if tokens[-1] in request.eos and not request.params.ignore_eos else tokens[-1]
            assert outcome.stop_reason == last
    k = request.params.logprobs
    if k is None:
        assert not outcome.logprobs
    else:
        found = [(e.chosen, e.rank, e.top_ids, e.top_values) for e in outcome.logprobs]
        assert found == [logprob_entry(token, k) for token in outcome.tokens]


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
