"""Requests whose tokens are read on the host: each token is planned when the one before has come back."""

from __future__ import annotations

import msgspec
from steps import finish, make_scheduler, plan, request, rows


def waiting(name: str, prompt: list[int], **changes: int):
    return msgspec.structs.replace(request(name, prompt, **changes), host_tokens=True)


def test_a_waiting_row_is_planned_when_its_token_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(waiting("a", [1, 2]))
    scheduler.add(request("b", [3]))
    first = plan(scheduler)
    assert first.num_rows == 2 and first.known is None, "a slot brings the tokens it has"
    second = plan(scheduler)
    assert rows(second) == [(1, 1, 1, True)] and second.known is None
    finish(scheduler, token=42)
    third = plan(scheduler)
    assert rows(third) == [(0, 2, 1, True), (1, 2, 1, True)]
    news = third.known
    assert news is not None
    assert (news.slot.tolist(), news.position.tolist(), news.token.tolist()) == ([0], [2], [42])


def test_nothing_is_planned_while_all_wait() -> None:
    scheduler = make_scheduler()
    scheduler.add(waiting("a", [1, 2]))
    plan(scheduler)
    assert scheduler.schedule() is None
    finish(scheduler)
    assert rows(plan(scheduler)) == [(0, 2, 1, True)]


def test_a_waiting_row_keeps_its_place_in_the_budget() -> None:
    """Or a request that is admitted meanwhile would decode with it, and both would not fit a step."""
    scheduler = make_scheduler(max_num_batched_tokens=1)
    scheduler.add(waiting("a", [1]))
    scheduler.add(request("b", [2]))
    plan(scheduler)
    assert scheduler.schedule() is None, "the one token of the budget is a's"
    for _ in range(7):
        finish(scheduler)
        assert plan(scheduler).slot_of_row.tolist() == [0]
    finish(scheduler)
    assert [new.request_id for new in plan(scheduler).new_slots] == ["b"]
