"""Requests of encoder-decoder models get the tokens that they get alone, under any schedule: with others of the same
input or another, chunks, prefix hits, drafts and preemptions."""

from __future__ import annotations

import drafting
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Outcome, Planned, Schedule, Settings, encoder_input, examples, run_schedule, schedules

from engine.types.params import SamplingParams

ROOMY = Settings(
    num_pages=100, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=40, in_flight=1, enable_prefix_caching=True
)
ONE, TWO = encoder_input([4, 2, 7, 1, 1, 3, 8, 8, 2]), encoder_input([4, 2, 7, 1, 1, 3, 8, 8, 3])


@given(
    schedule=st.one_of(
        schedules(VOCAB, encoders=True, drafters=("", *drafting.KINDS)),
        schedules(VOCAB, encoders=True, crowded=True, drafters=("", "", *drafting.KINDS)),
    ),
    layout=st.sampled_from(["full", "full and sliding"]),
)
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(schedule: Schedule, layout: str) -> None:
    """The worker checks that what is encoded in a step is within its budget."""
    core, _ = make_core(LAYOUTS[layout], schedule.settings)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])
    event(f"preemptions: {min(core.stats().num_preemptions, 3)}, prefix hits: {core.stats().prefix_hits > 0}")


def planned(name: str, **fields: object) -> Planned:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0)
    return Planned(request_id=name, prompt=tuple(range(11)), params=params, **fields)  # type: ignore[arg-type]


def test_prefixes_are_shared_under_one_input_alone() -> None:
    core, _ = make_core(LAYOUTS["full"], ROOMY)

    def cached(request: Planned) -> int:
        outcome = Outcome()
        core.add_request(request.to_request())
        while core.has_work():
            for output in core.step().outputs:
                outcome.take(output)
        check_outcome(core, request, outcome)
        return outcome.num_cached_tokens

    assert [cached(planned(str(i), encoder=encoder)) for i, encoder in enumerate((ONE, TWO, None))] == [0, 0, 0]
    assert cached(planned("salted", encoder=ONE, salt="mine")) == 0
    assert [cached(planned(f"again {i}", encoder=encoder)) for i, encoder in enumerate((ONE, TWO, None))] == [10] * 3


def test_a_step_encodes_no_more_than_its_budget() -> None:
    """Of 24 tokens a step has room for one input of 9 with a prompt of 11, and for a second one alone: with none of its
    prompt, so that request waits for the next step. The last two find their prompts cached."""
    core, executor = make_core(LAYOUTS["full"], ROOMY)
    entered: list[int] = []
    plain = executor.worker.execute
    executor.worker.execute = lambda plan: (entered.append(len(plan.new_slots)), plain(plan))[1]
    requests = tuple(planned(str(i), encoder=(ONE, TWO)[i % 2]) for i in range(4))
    outcomes = run_schedule(core, Schedule(settings=ROOMY, requests=requests))
    for request in requests:
        check_outcome(core, request, outcomes[request.request_id])
    assert entered[:3] == [1, 1, 2]
