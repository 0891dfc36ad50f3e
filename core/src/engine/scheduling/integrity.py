"""What must hold of a scheduler between steps: tests and the idle core look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.scheduling.request import Status

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError where requests, slots, pages and queue contradict each other."""
    scheduler.slots.check_integrity()
    scheduler.kv.check_integrity()
    by_status: dict[Status, int] = dict.fromkeys(Status, 0)
    for request in scheduler.requests.values():
        by_status[request.status] += 1
        assert (request.slot >= 0) == (request.status in (Status.RUNNING, Status.DRAINING)), request
    assert by_status[Status.RUNNING] == len(scheduler.running)
    assert by_status[Status.DRAINING] == len(scheduler.draining)
    assert by_status[Status.WAITING] == len(scheduler.policy)
    assert by_status[Status.HELD] == len(scheduler.siblings)
    assert by_status[Status.SWAPPED] == scheduler.num_swapped
    if scheduler.swapping is not None:
        scheduler.swapping.check_integrity(idle=not scheduler.requests)
    assert by_status[Status.COMPILING] == (0 if scheduler.constraints is None else scheduler.constraints.num_compiling)
    assert scheduler.prefilling.keys() <= scheduler.running.keys()
    for request in scheduler.running.values():
        slot = request.slot
        end = int(scheduler.slots.computed[slot] + scheduler.slots.drafts[slot])
        scheduler.kv.check_slot(slot, end, request.encoder)
    if not scheduler.requests and not scheduler.outstanding:
        assert scheduler.slots.num_free == scheduler.slots.num_slots
        assert scheduler.kv.pool.num_held == 0, "pages are held by nobody"
