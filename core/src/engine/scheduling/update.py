"""Taking a step's result in: tokens to their requests, full blocks to the prefix cache, and who has ended."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from engine.kv.manager import KVManager
from engine.scheduling.prompt_scores import take_prompt_scores
from engine.scheduling.request import Request
from engine.scheduling.slots import SlotTable
from engine.types.errors import ContractError
from engine.types.outputs import CoreOutput, TokenLogprobs
from engine.types.plan import LogprobRows, StepPlan, StepResult
from engine.types.request import FinishReason


class Accepted(NamedTuple):
    """News of a step.

    Args:
        outputs: one for each token that was accepted.
        ended: requests whose output says that they ended.
        prompt_tokens: of the requests whose first token is among the outputs.
        scores: further outputs, of prompts that brought log probabilities and no token.
    """

    outputs: list[CoreOutput]
    ended: list[Request]
    prompt_tokens: int
    scores: list[CoreOutput]


def accept(plan: StepPlan, result: StepResult, slots: SlotTable, kv: KVManager) -> Accepted:
    """Accept the drawn tokens. A token of a request that has ended meanwhile is surplus and is dropped.

    Raises:
        ContractError: the result does not fit the plan.
    """
    rows = np.flatnonzero(plan.samples)
    if result.tokens.shape != plan.slot_of_row.shape or (result.tokens[rows] < 0).any():
        raise ContractError(
            f"the tokens of step {plan.step_id}",
            f"the worker returned {result.tokens!r:.200} for {plan.num_rows} rows",
            "choose another executor or platform driver and tell its author",
            point="executor",
        )
    row_slots = plan.slot_of_row[rows]
    wanted = slots.accepts[row_slots]
    if not wanted.all():
        rows, row_slots = rows[wanted], row_slots[wanted]
    tokens = result.tokens[rows]
    positions = slots.known[row_slots]
    slots.tokens[row_slots, positions] = tokens
    known = positions + 1
    slots.known[row_slots] = known
    if kv.enable_prefix_caching:
        _commit(row_slots, known, slots, kv)

    ids = slots.request_ids
    outputs = [
        CoreOutput(request_id=ids[slot], new_token_ids=[token])
        for slot, token in zip(row_slots.tolist(), tokens.tolist(), strict=True)
    ]
    prompts = slots.prompt[row_slots]
    prompt_tokens = 0
    for i in np.flatnonzero(positions == prompts).tolist():
        request = _request(slots, row_slots[i])
        prompt_tokens += request.num_prompt_tokens
        outputs[i].num_cached_tokens = request.num_cached_tokens
        outputs[i].queue_time = request.admitted_at - request.queued_at
        outputs[i].prefill_time = time.monotonic() - request.admitted_at
    if result.logprobs is not None:
        _add_logprobs(outputs, rows, row_slots, result.logprobs, plan.num_rows, slots)
    scores: list[CoreOutput] = []
    if result.prompt_logprobs is not None:
        scores = take_prompt_scores(plan, result.prompt_logprobs, slots, outputs)

    ended = []
    stopped = _stopped(row_slots, tokens, known - prompts, slots)
    for i in np.flatnonzero(stopped | (known >= slots.limit[row_slots])).tolist():
        request = _request(slots, row_slots[i])
        token = int(tokens[i])
        if not stopped[i]:
            outputs[i].finish_reason = FinishReason.LENGTH
        else:
            outputs[i].finish_reason = FinishReason.STOP
            outputs[i].stop_reason = None if token in request.eos_token_ids else token
        ended.append(request)
    return Accepted(outputs, ended, prompt_tokens, scores)


def _request(slots: SlotTable, slot: np.integer) -> Request:
    request = slots.requests[slot]
    assert request is not None
    return request


def _commit(row_slots: np.ndarray, known: np.ndarray, slots: SlotTable, kv: KVManager) -> None:
    """Commit the blocks that became both known and computed. A preempted request's slot has none to offer."""
    filled = np.minimum(known, slots.computed[row_slots])
    for i in np.flatnonzero(filled // kv.block_size > kv.num_committed[row_slots]).tolist():
        slot = int(row_slots[i])
        request = _request(slots, row_slots[i])
        kv.commit(slot, request.hashes, request.root, slots.tokens[slot, : filled[i]])


def _stopped(row_slots: np.ndarray, tokens: np.ndarray, num_outputs: np.ndarray, slots: SlotTable) -> np.ndarray:
    """bool [n]; whether each token is one that ends its request."""
    stopped = (slots.stops[row_slots] == tokens[:, None]).any(axis=1)
    if slots.wide_stops:
        for i, slot in enumerate(row_slots.tolist()):
            stops = slots.wide_stops.get(slot)
            if stops is not None:
                stopped[i] = int(tokens[i]) in stops
    return stopped & (num_outputs >= slots.min_tokens[row_slots])


def _add_logprobs(
    outputs: list[CoreOutput],
    rows: np.ndarray,
    row_slots: np.ndarray,
    logprobs: LogprobRows,
    num_rows: int,
    slots: SlotTable,
) -> None:
    place = np.full(num_rows, -1, np.int64)
    place[rows] = np.arange(rows.size)
    chosen, rank = logprobs.chosen.tolist(), logprobs.rank.tolist()
    for m, i in enumerate(place[logprobs.row].tolist()):
        k = _request(slots, row_slots[i]).params.logprobs if i >= 0 else None
        if k is None:
            continue  # surplus
        entry = TokenLogprobs(
            chosen=chosen[m],
            rank=rank[m],
            top_ids=logprobs.top_ids[m, :k].tolist(),
            top_values=logprobs.top_values[m, :k].tolist(),
        )
        outputs[i].new_logprobs = [entry]
