"""Requests that draw no token: they end with their prompt, whose hidden states the worker pools."""

from __future__ import annotations

import time

import numpy as np

from engine.scheduling.request import Request
from engine.scheduling.slots import SlotTable
from engine.scheduling.update import Accepted
from engine.types.errors import ContractError
from engine.types.outputs import CoreOutput
from engine.types.plan import PooledRows, StepPlan, StepResult
from engine.types.request import FinishReason


def pooled_hit_limit(request: Request) -> int:
    """The most tokens that a request which pools may take from the prefix cache. The last token's hidden state needs
    that token computed; the mean and the vectors of single tokens need all of them, "cls" the first.
    """
    params = request.pooling
    assert params is not None
    return request.token_ids.size - 1 if params.task != "token_embed" and params.pooling_type == "last" else 0


def take_pooled(plan: StepPlan, result: StepResult, slots: SlotTable, accepted: Accepted) -> Accepted:
    """Add what a step pooled to its news. What belongs to a request that has ended is dropped. A preempted request is
    computed again: vectors of tokens that it had sent are dropped, and a result that still comes is its result.

    Raises:
        ContractError: a row whose prompt is computed has no result, or the results do not fit the plan.
    """
    outputs: list[CoreOutput] = []
    ended: list[Request] = []
    given = _by_row(result.pooled)
    for row, (slot, end) in enumerate(
        zip(plan.slot_of_row.tolist(), (plan.num_computed + plan.num_tokens).tolist(), strict=True)
    ):
        request = slots.requests[slot]
        if request is None or request.pooling is None or not slots.accepts[slot]:
            continue
        start, data = given.get(row, (0, None))
        done = end == request.num_prompt_tokens
        if data is None:
            if done or request.pooling.task == "token_embed":
                raise _misfit(plan, row)
            continue
        if request.pooling.task == "token_embed":
            if data.ndim != 2 or start + len(data) != end or start > request.num_pooled:
                raise _misfit(plan, row)
            data = data[request.num_pooled - start :]
            request.num_pooled += len(data)
        elif not done or data.ndim != 1:
            raise _misfit(plan, row)
        output = CoreOutput(request_id=request.request_id, pooled=data)
        outputs.append(output)
        if done:
            output.finish_reason = FinishReason.STOP
            output.num_cached_tokens = request.num_cached_tokens
            output.queue_time = request.admitted_at - request.queued_at
            output.prefill_time = time.monotonic() - request.admitted_at
            ended.append(request)
    return accepted._replace(
        outputs=accepted.outputs + outputs,
        ended=accepted.ended + ended,
        prompt_tokens=accepted.prompt_tokens + sum(request.num_prompt_tokens for request in ended),
    )


def _by_row(pooled: PooledRows | None) -> dict[int, tuple[int, np.ndarray]]:
    """For each row that has something: (start, data)."""
    if pooled is None:
        return {}
    return {
        row: (start, data)
        for row, start, data in zip(pooled.row.tolist(), pooled.start.tolist(), pooled.data, strict=True)
    }


def _misfit(plan: StepPlan, row: int) -> ContractError:
    return ContractError(
        f"what step {plan.step_id} pooled",
        f"row {row} has no result, or one of another form than its request asked for",
        "choose another executor or platform driver and tell its author",
        point="executor",
    )
