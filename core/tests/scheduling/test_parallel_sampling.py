"""The requests of a parallel-sampling group wait for the one that computes their prompt."""

from __future__ import annotations

from engine.scheduling.slots import Request, SlotTable
from engine.scheduling.states import ParallelSampling
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest


def request(request_id: str, parent: str | None = "p") -> Request:
    table = SlotTable(1, 8)
    new = EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), parent=parent)
    return Request(new, table, 8, b"")


def test_the_first_leads_and_the_others_follow_when_its_prompt_is_done() -> None:
    groups = ParallelSampling()
    a, b, c = request("a"), request("b"), request("c")
    assert [groups.join(r) for r in (a, b, c)] == [True, False, False] and len(groups) == 2
    assert groups.prompt_done(b) == []
    assert groups.prompt_done(a) == [b, c]
    assert len(groups) == 0 and groups.prompt_done(a) == [] and groups.ended(a) == []


def test_when_the_leader_ends_the_next_one_leads() -> None:
    groups = ParallelSampling()
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        groups.join(r)
    assert groups.ended(a) == [b] and len(groups) == 1
    assert groups.prompt_done(b) == [c]


def test_one_that_is_held_may_end() -> None:
    groups = ParallelSampling()
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        groups.join(r)
    assert groups.ended(b) == []
    assert groups.prompt_done(a) == [c]
    assert groups.join(request("d"))  # a late one leads again


def test_requests_without_siblings_pass() -> None:
    groups = ParallelSampling()
    a = request("a", None)
    assert groups.join(a) and groups.prompt_done(a) == [] and groups.ended(a) == []
