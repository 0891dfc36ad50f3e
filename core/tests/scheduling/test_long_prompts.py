"""Long prompts in small chunks: what is computed beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import finish, make_scheduler, plan, request, rows

from engine.scheduling.admission import share_budget


def test_decodes_and_short_prompts_go_on_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=400)
    scheduler.add(request("decodes", [1, 2], max_tokens=40))
    plan(scheduler)
    finish(scheduler)
    scheduler.add(request("long", [3] * 320))
    steps_of_long = ends = 0
    for i in range(40):
        if i % 4 == 0:
            scheduler.add(request(f"short {i}", [5 + i] * 6, max_tokens=2))
        made = plan(scheduler)
        sizes = {scheduler.slots.request_ids[slot]: n for slot, _, n, _ in rows(made)}
        if i < 38:
            assert sizes["decodes"] == 1, "a decode in every step"
        steps_of_long += sizes.get("long") == 8
        if i % 4 == 0:
            assert sizes[f"short {i}"] == 6, "a short prompt is computed in the step in which it comes"
        ends += sum(output.finish_reason is not None for output in finish(scheduler))
    assert steps_of_long == 40 and ends >= 10
    assert "long" in scheduler.running and scheduler.slots.phase[scheduler.running["long"].slot] == 2, "it decodes now"


def test_without_it_a_short_prompt_waits_for_the_long_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_model_len=400)
    scheduler.add(request("long", [3] * 320))
    scheduler.add(request("short", [5] * 6))
    for _ in range(19):
        assert plan(scheduler).num_rows == 1
        finish(scheduler)


@pytest.mark.parametrize("num_long", [2, 3])
def test_several_long_prompts_leave_room_for_a_short_one_behind_them(num_long: int) -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=400, num_pages=400
    )
    for i in range(num_long):
        scheduler.add(request(f"long {i}", [3 + i] * 320))
    for _ in range(num_long + 1):
        plan(scheduler)
        finish(scheduler)
    assert len(scheduler.running) == num_long
    scheduler.add(request("short", [9] * 6))
    assert 6 in [row[2] for row in rows(plan(scheduler))]


def test_long_prompts_that_pause_keep_their_pages_in_reserve() -> None:
    """Or others are admitted on pages that the long prompts will want, and someone is preempted."""
    scheduler = make_scheduler(
        max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=100, num_pages=51
    )
    for i in range(2):
        scheduler.add(request(f"long {i}", [3 + i] * 80, max_tokens=1))  # 20 pages each of 50
    scheduler.add(request("third", [9] * 60, max_tokens=1))  # 15
    while scheduler.has_work:
        plan(scheduler)
        finish(scheduler)
    assert scheduler.num_preemptions == 0


remaining = st.lists(st.integers(1, 50), max_size=8).map(lambda sizes: list(enumerate(sizes)))


@given(remaining=remaining, budget=st.integers(0, 60), threshold=st.integers(1, 30), others=st.booleans())
def test_shares(remaining: list[tuple[int, int]], budget: int, threshold: int, others: bool) -> None:
    shares = share_budget(remaining, budget, threshold, others)
    left = dict(remaining)
    assert len({prompt for prompt, _ in shares}) == len(shares)
    assert all(1 <= size <= min(threshold, left[prompt]) for prompt, size in shares)
    total = sum(size for _, size in shares)
    assert total <= budget
    if remaining and budget:
        oldest_long = next((prompt for prompt, tokens in remaining if tokens > threshold), None)
        first = remaining[0][0] if oldest_long is None else oldest_long
        assert shares[0] == (first, min(left[first], threshold, budget)), "the oldest long prompt never stops"
    if not others:
        assert total == min(budget, sum(min(tokens, threshold) for _, tokens in remaining)), "nothing is left idle"
    elif total > threshold:
        rest = sum(size for prompt, size in shares[1:] if left[prompt] > threshold)
        assert not rest or budget - total >= min(threshold, budget), "the queue gets its part"
