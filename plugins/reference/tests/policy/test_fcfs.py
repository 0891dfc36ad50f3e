"""The builtin policy."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from cores import LAYOUTS

from engine.interfaces.context import CoreContext
from engine_reference.policy_fcfs import FCFS


class Waiting(NamedTuple):
    request_id: str
    arrival_time: float = 0.0
    num_tokens: int = 1


def fcfs(*ids: str) -> FCFS:
    policy = FCFS(CoreContext(layout=LAYOUTS["full"], max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8))
    for request_id in ids:
        policy.push(Waiting(request_id))
    return policy


def drain(policy: FCFS) -> list[str]:
    return [policy.pop().request_id for _ in range(len(policy))]


def test_in_order_of_arrival() -> None:
    policy = fcfs("a", "b", "c")
    assert policy.peek() == Waiting("a") and len(policy) == 3
    assert {request.request_id for request in policy} == {"a", "b", "c"}
    assert drain(policy) == ["a", "b", "c"]


def test_what_was_preempted_goes_first() -> None:
    policy = fcfs("a", "b")
    policy.push_front(Waiting("y"))
    policy.push_front(Waiting("x"))
    assert drain(policy) == ["x", "y", "a", "b"]


def test_aborted_requests_are_taken_out() -> None:
    policy = fcfs("a", "b", "c")
    policy.remove(Waiting("b"))
    with pytest.raises(KeyError):
        policy.remove(Waiting("b"))
    assert drain(policy) == ["a", "c"]


def test_an_empty_queue() -> None:
    assert fcfs().peek() is None
    with pytest.raises(IndexError):
        fcfs().pop()


def test_the_victim_was_admitted_last() -> None:
    several = [Waiting("a"), Waiting("b"), Waiting("c")]
    assert fcfs().victim(several, [1, 2, 3]) == Waiting("c")
    assert fcfs().victim(several, [1, 2, 0]) == Waiting("b")
    assert fcfs().victim(several, [0, 0, 0]) == Waiting("c")
