"""What metrics are made of: tokens since start, and how long a request waited and computed its prompt."""

from __future__ import annotations

from steps import finish, make_scheduler, plan, request, run


def test_tokens_since_start() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 40, max_tokens=3))  # more than one step's budget: two chunks
    plan(scheduler)
    finish(scheduler)
    assert (scheduler.prompt_tokens, scheduler.generation_tokens) == (0, 0)
    plan(scheduler)
    finish(scheduler)
    assert (scheduler.prompt_tokens, scheduler.generation_tokens) == (40, 1)
    scheduler.add(request("b", 40, max_tokens=2))  # cached tokens count too
    run(scheduler)
    assert (scheduler.prompt_tokens, scheduler.generation_tokens) == (80, 5)


def test_a_preempted_request_counts_its_prompt_once() -> None:
    scheduler = make_scheduler(num_pages=9, max_num_seqs=2)
    for name in "ab":
        scheduler.add(request(name, [ord(name)] * 10, max_tokens=20))
    run(scheduler)
    assert scheduler.num_preemptions > 0
    assert (scheduler.prompt_tokens, scheduler.generation_tokens) == (20, 40)


def test_times_of_a_request() -> None:
    now = [100.0]
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.slots.now = lambda: now[0]
    scheduler.add(request("a", 5, max_tokens=1))
    scheduler.add(request("b", 40, max_tokens=2))
    plan(scheduler)
    now[0] = 103.0
    (first,) = finish(scheduler)
    assert (first.request_id, first.queue_time, first.prefill_time) == ("a", 0.0, 3.0)
    outputs = []
    for when in (104.0, 105.0, 106.0):
        plan(scheduler)
        now[0] = when
        outputs += finish(scheduler)
    assert [(o.queue_time, o.prefill_time) for o in outputs] == [(3.0, 2.0), (0.0, 0.0)]
