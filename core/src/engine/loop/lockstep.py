"""A core that steps together with others: what becomes of a plan before it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interfaces.lockstep import Lockstep
    from engine.scheduling.scheduler import Scheduler
    from engine.types.plan import StepPlan


def agreed(plan: StepPlan | None, scheduler: Scheduler, lockstep: Lockstep, under_way: bool) -> StepPlan | None:
    """The plan, or one of padding, as all cores are to compute it together. None where nothing is to be launched: a
    result has to come first, or all sleep.

    Args:
        plan: what the scheduler makes of its requests.
        under_way: whether results are to come.
    """
    if plan is None:
        waits = under_way and any(earlier.num_rows for earlier in scheduler.outstanding)
        if waits or not lockstep.awake:
            return None
    rows, decodes = (0, 0) if plan is None else (plan.num_rows, plan.num_decodes)
    told = lockstep.agree(0 if plan is None else plan.total_tokens, rows == decodes)
    if told is None:
        return None if rows else plan
    plan = scheduler.idle() if plan is None else plan
    plan.lockstep = told.tokens
    plan.decodes = told.decodes
    plan.idle_tokens = 0 if rows else int(told.tokens[lockstep.rank])
    return plan
