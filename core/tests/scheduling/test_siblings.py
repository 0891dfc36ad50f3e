"""Siblings wait for the one that computes their prompt."""

from __future__ import annotations

from engine.scheduling.request import Request
from engine.scheduling.siblings import Siblings
from engine.scheduling.slots import SlotTable
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest


def request(request_id: str, parent: str | None = "p") -> Request:
    table = SlotTable(1, 8)
    new = EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), parent=parent)
    return Request(new, table, 8, b"")


def test_the_first_leads_and_the_others_follow_when_its_prompt_is_done() -> None:
    siblings = Siblings()
    a, b, c = request("a"), request("b"), request("c")
    assert [siblings.join(r) for r in (a, b, c)] == [True, False, False] and len(siblings) == 2
    assert siblings.prompt_done(b) == []
    assert siblings.prompt_done(a) == [b, c]
    assert len(siblings) == 0 and siblings.prompt_done(a) == [] and siblings.ended(a) == []


def test_when_the_leader_ends_the_next_one_leads() -> None:
    siblings = Siblings()
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        siblings.join(r)
    assert siblings.ended(a) == [b] and len(siblings) == 1
    assert siblings.prompt_done(b) == [c]


def test_one_that_is_held_may_end() -> None:
    siblings = Siblings()
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        siblings.join(r)
    assert siblings.ended(b) == []
    assert siblings.prompt_done(a) == [c]
    assert siblings.join(request("d"))  # a late one leads again


def test_requests_without_siblings_pass() -> None:
    siblings = Siblings()
    a = request("a", None)
    assert siblings.join(a) and siblings.prompt_done(a) == [] and siblings.ended(a) == []
