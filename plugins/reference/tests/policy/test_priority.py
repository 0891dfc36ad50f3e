"""The policy `priority` against a plain sorted list, and in a whole engine core."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from cores import LAYOUTS, make_core
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Planned, Schedule, Settings, examples, run_schedule, schedules

from engine.interfaces.context import CoreContext
from engine.types.params import SamplingParams
from engine_reference.policy_priority import Priority, PriorityOptions


class Waiting(NamedTuple):
    request_id: str
    priority: int = 0
    arrival_time: float = 0.0
    num_tokens: int = 1


def policy(aging_seconds: float | None = None) -> Priority:
    options = PriorityOptions(aging_seconds=aging_seconds)
    return Priority(
        CoreContext(layout=LAYOUTS["full"], max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, options=options)
    )


def drain(queue: Priority) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_urgent_first_then_in_order_of_arrival() -> None:
    queue = policy()
    for request in (Waiting("late", 1, 5), Waiting("b", 0, 2), Waiting("a", 0, 1), Waiting("early", 1, 0)):
        queue.push(request)
    assert drain(queue) == ["a", "b", "early", "late"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_what_was_preempted_goes_before_its_equals_only() -> None:
    queue = policy()
    queue.push(Waiting("equal", 1))
    queue.push(Waiting("urgent", 0))
    queue.push_front(Waiting("preempted", 1))
    assert drain(queue) == ["urgent", "preempted", "equal"]


def test_ageing_overtakes_urgent_ones_that_come_later() -> None:
    queue = policy(aging_seconds=10)
    queue.push(Waiting("old", 2, 100.0))
    queue.push(Waiting("urgent, soon after", 0, 119.0))
    queue.push(Waiting("urgent, much later", 0, 121.0))
    assert drain(queue) == ["urgent, soon after", "old", "urgent, much later"]


def test_the_victim_is_the_least_urgent_and_of_equals_the_last_admitted() -> None:
    running = [Waiting("a", 1, 1), Waiting("b", 3, 1), Waiting("c", 3, 1), Waiting("d", 2, 9)]
    assert policy().victim(running, [1] * len(running)) == running[2]


@given(st.data())
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_against_a_sorted_list(data: st.DataObject) -> None:
    queue, plain = policy(), list[tuple[tuple[int, float, int], Waiting]]()
    for count in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "push", "front", "pop", "remove"]))
        if action in ("push", "front"):
            request = Waiting(f"r{count}", data.draw(st.integers(-2, 2)), float(data.draw(st.integers(0, 3))))
            (queue.push if action == "push" else queue.push_front)(request)
            number = count + 1 if action == "push" else -count - 1
            plain.append(((request.priority, request.arrival_time, number), request))
        elif plain:
            _, request = min(plain) if action == "pop" else data.draw(st.sampled_from(plain))
            if action == "pop":
                assert queue.pop() == request
            else:
                queue.remove(request)
                with pytest.raises(KeyError):
                    queue.remove(request)
            plain = [entry for entry in plain if entry[1] != request]
        assert queue.peek() == (min(plain)[1] if plain else None)
        assert len(queue) == len(plain) and set(queue) == {request for _, request in plain}


class WithOptions(Priority):
    """As the engine builds it when the user sets no option."""

    def __init__(self, context: CoreContext) -> None:
        super().__init__(replace(context, options=PriorityOptions()))


@given(schedule=schedules(VOCAB), layout=st.sampled_from(sorted(LAYOUTS)), seed=st.integers(0, 9))
@hypothesis_settings(max_examples=examples(25), deadline=None)
def test_any_schedule_with_priorities(schedule: Schedule, layout: str, seed: int) -> None:
    requests = tuple(replace(r, priority=(i * 7 + seed) % 3) for i, r in enumerate(schedule.requests))
    schedule = replace(schedule, requests=requests)
    core, _ = make_core(LAYOUTS[layout], schedule.settings, policy=WithOptions)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        check_outcome(core, request, outcomes[request.request_id])


def test_a_prompt_that_is_left_alone_by_preemption_goes_on() -> None:
    """The only decode is preempted for want of a page while a more urgent prompt is half computed: the prompt then has
    the whole cache, and must not be told that it is too small."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=0)
    short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)
    settings = Settings(
        num_pages=10, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=40, in_flight=1,
        enable_prefix_caching=False, hold=False,
    )  # fmt: skip
    requests = (
        Planned(request_id="decode", prompt=(1, 2, 3, 4), params=long, priority=1),
        Planned(request_id="prompt", prompt=tuple(range(1, 13)) * 2, params=short, arrives=2),
    )
    core, _ = make_core(LAYOUTS["full"], settings, policy=WithOptions)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    assert core.stats().num_preemptions == 1
    for request in requests:
        assert outcomes[request.request_id].finish_reason == "length", outcomes[request.request_id].error
        check_outcome(core, request, outcomes[request.request_id])
