"""Pages that are lent stay as they are until they are given back; who needs them waits, and is not refused."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from steps import finish, make_scheduler, plan, request, run

from engine.scheduling.scheduler import Scheduler
from engine.types.request import FinishReason


def pages_of(scheduler: Scheduler, slot: int) -> np.ndarray:
    return np.concatenate([table.live(slot) for table in scheduler.kv.tables]).copy()


def test_who_needs_lent_pages_waits_for_them() -> None:
    scheduler = make_scheduler(num_pages=5)
    scheduler.add(request("lender", [1] * 12, max_tokens=1))
    made = plan(scheduler)
    lease = scheduler.kv.pool.lend(pages_of(scheduler, made.new_slots[0].slot))
    finish(scheduler)
    assert not scheduler.requests and scheduler.kv.pool.num_held == 3
    scheduler.check_integrity()
    scheduler.add(request("next", [2] * 12, max_tokens=1))
    plan(scheduler)  # there is one page
    finish(scheduler)
    assert scheduler.schedule() is None and "next" in scheduler.requests and not scheduler.take_notices()
    scheduler.kv.pool.give_back(lease)
    (end,) = run(scheduler)
    assert end.request_id == "next" and end.finish_reason is FinishReason.LENGTH
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_held == 0


@given(st.integers(0, 10**6))
def test_whatever_the_order_nothing_is_lost(seed: int) -> None:
    """Requests come, lend, are aborted and end while leases are given back in any order."""
    rng = random.Random(seed)
    scheduler, leases, left = make_scheduler(num_pages=9, max_num_seqs=3), dict[int, np.ndarray](), list(range(8))
    content: dict[int, list[int]] = {}
    while left or scheduler.has_work or leases:
        choice = rng.randrange(6)
        if choice == 0 and left:
            name = left.pop()
            prompt = [name % 3] * rng.randint(1, 14)
            scheduler.add(request(f"{name}", prompt, max_tokens=rng.randint(1, 6)))
        elif choice == 1 and scheduler.running:
            held = pages_of(scheduler, rng.choice(list(scheduler.running.values())).slot)
            if held.size:
                lease = scheduler.kv.pool.lend(held)
                leases[lease] = held
                content[lease] = held.tolist()
        elif choice == 2 and leases:
            lease = rng.choice(list(leases))
            assert leases.pop(lease).tolist() == content.pop(lease)
            scheduler.kv.pool.give_back(lease)
        elif choice == 3 and rng.random() < 0.3 and scheduler.requests:
            scheduler.abort([rng.choice(list(scheduler.requests))])
        elif (made := scheduler.schedule()) is not None or scheduler.outstanding:
            lent = set(np.concatenate([*leases.values(), np.empty(0, np.int32)]).tolist())
            fresh = set() if made is None else {page for new in made.new_blocks for page in new.page.tolist()}
            held = {p for r in scheduler.running.values() for p in pages_of(scheduler, r.slot).tolist()}
            assert not (fresh & lent) - _cached(scheduler), "a page that is lent was given out anew"
            assert fresh <= held | {0}
            finish(scheduler)
        scheduler.take_notices()
        scheduler.check_integrity()
    assert scheduler.kv.pool.num_held == 0


def _cached(scheduler: Scheduler) -> set[int]:
    """Pages that requests may share because the cache has them."""
    return set(np.flatnonzero(scheduler.kv.pool.committed).tolist())
