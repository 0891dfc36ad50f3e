"""Requests with encoder inputs get the tokens that they get alone, however their encoder's blocks are shared."""

from __future__ import annotations

from dataclasses import replace

import drafting
import pytest
from cores import LAYOUTS, MAX_ENCODER_LEN, make_core
from hypothesis import event, given, settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Outcome, Planned, Schedule, Settings, run_schedule, schedules

from engine.loop.engine_core import EngineCore
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams
from engine.types.request import EncoderInput

CROSS = ["full and cross", "all kinds", "sliding and cross of other heads"]
ROOMY = Settings(
    num_pages=100, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, in_flight=1, enable_prefix_caching=True
)
ONE, TWO = EncoderInput(hash=b"one", num_tokens=9), EncoderInput(hash=b"two", num_tokens=9)


def check(schedule: Schedule, layout: str) -> EngineCore:
    core, _ = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    return core


def ask(core: EngineCore, name: str, encoder: EncoderInput | None, **fields: object) -> tuple[int, Outcome]:
    """Pages that one request took of the pool, and what it got."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0)
    planned = Planned(request_id=name, prompt=tuple(range(11)), params=params, encoder=encoder, **fields)
    core.add_request(planned.to_request())
    outcome, most = Outcome(), 0
    while core.has_work():
        for output in core.step().outputs:
            outcome.take(output)
        core.check_integrity()
        most = max(most, core.scheduler.kv.pool.num_held)
    check_outcome(core, planned, outcome)
    return most, outcome


@given(
    schedule=schedules(VOCAB, max_encoder_len=MAX_ENCODER_LEN, drafters=("", *drafting.KINDS)),
    layout=st.sampled_from(CROSS),
)
@settings(max_examples=60, deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    core = check(schedule, layout)
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}, prefix hits: {core.stats().prefix_hits > 0}")


@given(
    schedule=schedules(VOCAB, max_encoder_len=9, crowded=True, drafters=("", "", *drafting.KINDS)),
    layout=st.sampled_from(CROSS),
    failing=st.sampled_from([0.0, 0.0, 0.3]),
)
@settings(max_examples=60, deadline=None)
def test_preempted_requests_get_the_tokens_that_they_get_alone(schedule: Schedule, layout: str, failing: float) -> None:
    core = check(replace(schedule, settings=replace(schedule.settings, failing_loads=failing)), layout)
    stats = core.stats()
    event(f"preemptions: {min(stats.num_preemptions, 3)}, swapped: {min(stats.num_swap_preemptions, 3)}")
    assert stats.swap_pages_used == 0


@pytest.mark.parametrize("layout", ["full and cross", "sliding and cross of other heads"])
def test_prefixes_are_shared_under_one_encoder_input_alone(layout: str) -> None:
    core, _ = make_core(LAYOUTS[layout], ROOMY)
    assert ask(core, "a", ONE)[1].num_cached_tokens == 0
    assert ask(core, "b", TWO)[1].num_cached_tokens == 0
    assert ask(core, "c", None)[1].num_cached_tokens == 0
    assert ask(core, "d", EncoderInput(hash=ONE.hash, num_tokens=8))[1].num_cached_tokens == 0
    assert ask(core, "e", ONE, salt="mine")[1].num_cached_tokens == 0
    for name, encoder in (("f", ONE), ("g", TWO), ("h", None)):
        assert ask(core, name, encoder)[1].num_cached_tokens == 10


def test_requests_share_the_blocks_of_one_encoder_input() -> None:
    """Two in one plan, a third while they run: 3 pages for the encoder's 9 tokens, once."""
    core, executor = make_core(LAYOUTS["full and cross"], ROOMY)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
    requests = [
        Planned(request_id=f"r{i}", prompt=(i, 1, 2), params=params, encoder=ONE, arrives=0 if i < 2 else 3)
        for i in range(3)
    ]
    seen = []
    plain = executor.worker.execute
    executor.worker.execute = lambda plan: (seen.extend(new.fills_encoder for new in plan.new_slots), plain(plan))[1]
    outcomes = run_schedule(core, Schedule(settings=ROOMY, requests=tuple(requests)))
    for request in requests:
        check_outcome(core, request, outcomes[request.request_id])
    assert seen == [True, False, False]
    pages = {tuple(executor.worker.block_tables[1][slot, :3]) for slot in range(4)} - {(-1, -1, -1)}
    assert len(pages) == 1


def test_pages_count_the_encoders_tokens() -> None:
    layout = LAYOUTS["full and cross"]
    core, _ = make_core(layout, ROOMY)
    assert ask(core, "none", None)[0] == 3 and ask(core, "one", ONE)[0] == 3 + 3
    small = replace(ROOMY, num_pages=1 + 5)
    core, _ = make_core(layout, small)
    kv = core.scheduler.kv
    assert kv.fits_at_all(11) and kv.fits_at_all(8, ONE) and not kv.fits_at_all(9, ONE)
    assert ask(core, "too large", ONE)[1].error is not None
    assert ask(core, "fits", None)[1].finish_reason == "length"


@pytest.mark.parametrize(
    ("layout", "num_tokens", "why"),
    [("full", 3, "no layers that read one"), ("full and cross", 0, "reads 1 to 48"), ("full and cross", 49, "to 48")],
)
def test_an_input_that_does_not_fit_the_model_is_refused(layout: str, num_tokens: int, why: str) -> None:
    core, _ = make_core(LAYOUTS[layout], ROOMY)
    request = Planned(
        request_id="a",
        prompt=(1, 2),
        params=SamplingParams(temperature=0, max_tokens=2, seed=0),
        encoder=EncoderInput(hash=b"x", num_tokens=num_tokens),
    )
    with pytest.raises(InvalidRequestError, match=why):
        core.add_request(request.to_request())
    assert not core.has_work()
