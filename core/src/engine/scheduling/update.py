"""Taking a step's result in: tokens to their requests, full blocks to the prefix cache, and who has ended."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from engine.kv.manager import KVManager
from engine.scheduling.constraints import Ending, follow
from engine.scheduling.jump_ahead import JumpAhead
from engine.scheduling.prompt_scores import take_prompt_scores
from engine.scheduling.request import Request
from engine.scheduling.slots import DECODE, SlotTable
from engine.scheduling.speculation import Speculation
from engine.types.outputs import CoreOutput, TokenLogprobs
from engine.types.plan import LogprobRows, StepPlan, StepResult
from engine.types.request import FinishReason

_NOWHERE = np.empty(0, np.intp)


class Accepted(NamedTuple):
    """News of a step.

    Args:
        outputs: one for each request that got tokens.
        ended: requests whose output says that they ended.
        prompt_tokens: of the requests whose first token is among the outputs.
        generation_tokens: accepted.
        scores: further outputs, of prompts that brought log probabilities and no token.
    """

    outputs: list[CoreOutput]
    ended: list[Request]
    prompt_tokens: int
    generation_tokens: int
    scores: list[CoreOutput]


def accept(
    plan: StepPlan,
    result: StepResult,
    slots: SlotTable,
    kv: KVManager,
    speculation: Speculation | None = None,
    jump_ahead: JumpAhead | None = None,
) -> Accepted:
    """Accept the drawn tokens. A token of a request that has ended meanwhile is surplus and is dropped, and so is one
    behind the token that ends its request.

    Args:
        result: was checked, see `engine.scheduling.contract`.
    """
    rows = plan.samples.nonzero()[0]
    drawn, counts = _drawn(plan, result, rows)
    row_slots = plan.slot_of_row[rows]
    wanted = slots.accepts[row_slots]
    if np.count_nonzero(wanted) < rows.size:
        rows, row_slots, drawn, counts = rows[wanted], row_slots[wanted], drawn[wanted], counts[wanted]
    positions = slots.known[row_slots]
    prompts = slots.prompt[row_slots]
    stopped, last = _stops(row_slots, drawn, positions, slots)
    kept = counts
    if stopped.size:
        kept = counts.copy()
        kept[stopped] = last + 1
    by_stop = set(stopped.tolist())
    endings: list[Ending] = []
    if slots.num_matched and (endings := follow(row_slots, drawn, kept, by_stop, slots)):
        kept = kept.copy()
        kept[[ending.place for ending in endings]] = [ending.kept for ending in endings]
    if plan.num_drafts is not None and rows.size:
        assert result.num_drafts is not None
        _settle_drafts(plan, rows, row_slots, counts, slots, kv)
        accepted = np.minimum(counts - 1, kept)
        for learning, tried in _tried(plan, rows, speculation, jump_ahead):
            learning.learn(row_slots[tried], (positions + kept)[tried], result.num_drafts[rows][tried], accepted[tried])
    known = positions + kept
    tokens = _remember(row_slots, positions, drawn, kept, slots)
    slots.known[row_slots] = known
    if kv.enable_prefix_caching:
        # Blocks count when they are both known and computed. A preempted request's slot has none to offer.
        kv.commit(row_slots, np.minimum(known, slots.computed[row_slots]), slots.requests, slots.tokens)

    ids = slots.request_ids
    outputs = [
        CoreOutput(request_id=ids[slot], new_token_ids=of_row)
        for slot, of_row in zip(row_slots.tolist(), tokens, strict=True)
    ]
    prompt_tokens = 0
    for i in (positions == prompts).nonzero()[0].tolist():
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
    over = known >= slots.limit[row_slots]
    over[stopped] = True
    for ending in endings:
        ending.write(outputs[ending.place])
        ended.append(_request(slots, row_slots[ending.place]))
        over[ending.place] = False
    for i in over.nonzero()[0].tolist():
        request = _request(slots, row_slots[i])
        token = outputs[i].new_token_ids[-1]
        if i not in by_stop:
            outputs[i].finish_reason = FinishReason.LENGTH
        else:
            outputs[i].finish_reason = FinishReason.STOP
            outputs[i].stop_reason = None if token in request.eos_token_ids else token
        ended.append(request)
    num_tokens = rows.size if plan.num_drafts is None and not endings else int(np.add.reduce(kept))
    return Accepted(outputs, ended, prompt_tokens, num_tokens, scores)


def _tried(
    plan: StepPlan, rows: np.ndarray, speculation: Speculation | None, jump_ahead: JumpAhead | None
) -> list[tuple[Speculation, np.ndarray]]:
    """Who hears what became of the drafts of which rows, bool [n]: whoever they came from."""
    assert plan.num_drafts is not None
    tried, found = plan.num_drafts[rows] > 0, []
    if plan.given_drafts is not None:
        assert jump_ahead is not None
        given = np.isin(rows, plan.given_drafts.row)
        found.append((jump_ahead.learned, tried & given))
        tried = tried & ~given
    if speculation is not None:
        found.append((speculation, tried))
    return found


def _drawn(plan: StepPlan, result: StepResult, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that the rows which sample drew, int32 [n, 1 + k]; and how many they are, int32 [n]."""
    tokens = result.tokens if result.tokens.ndim == 2 else result.tokens[..., None]
    drawn, counts = tokens[rows], np.empty(rows.size, np.int32)
    counts.fill(1)  # `np.ones` takes a microsecond more
    for column in range(1, drawn.shape[1]):
        counts += drawn[:, column] >= 0
    return drawn, counts


def _settle_drafts(
    plan: StepPlan, rows: np.ndarray, row_slots: np.ndarray, counts: np.ndarray, slots: SlotTable, kv: KVManager
) -> None:
    """Count the drafts that were accepted as computed and placed, and give back the pages of the others. A preempted
    request's slot has none to give."""
    assert plan.num_drafts is not None
    drafted = plan.num_drafts[rows] > 0
    mine, extra = row_slots[drafted], counts[drafted] - 1
    slots.computed[mine] += extra
    slots.placed[mine] += extra
    slots.drafts[mine] = 0
    mine = mine[slots.phase[mine] == DECODE]
    kv.trim(mine, slots.computed[mine], plan.step_id)


def _remember(
    row_slots: np.ndarray, positions: np.ndarray, drawn: np.ndarray, kept: np.ndarray, slots: SlotTable
) -> list[list[int]]:
    """Write the tokens that were kept behind those known; returns them, row by row."""
    if drawn.shape[1] == 1 and kept.all():
        slots.tokens[row_slots, positions] = drawn[:, 0]
        rows: list[list[int]] = drawn.tolist()
        return rows
    place = np.arange(drawn.shape[1])
    mine = place < kept[:, None]
    tokens = drawn[mine]
    slots.tokens[row_slots.repeat(kept), (positions[:, None] + place)[mine]] = tokens
    flat = tokens.tolist()
    return [flat[end - n : end] for end, n in zip(kept.cumsum().tolist(), kept.tolist(), strict=True)]


def _request(slots: SlotTable, slot: np.integer) -> Request:
    request = slots.requests[slot]
    assert request is not None
    return request


def _stops(
    row_slots: np.ndarray, drawn: np.ndarray, positions: np.ndarray, slots: SlotTable
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of drawn [n, W] hold a token that ends its request, and in which column the first of these stands.

    positions: int [n]; of the first column.
    """
    found = slots.stops.take(row_slots, axis=1)[:, None] == drawn.T
    # Mostly there is none, which is quickly counted.
    _, columns, rows = found.nonzero() if np.count_nonzero(found) else (_NOWHERE,) * 3
    if slots.wide_stops:
        wide = [
            (row, column)
            for row, slot in enumerate(row_slots.tolist())
            if (ids := slots.wide_stops.get(slot)) is not None
            for column, token in enumerate(drawn[row].tolist())
            if token in ids
        ]
        rows, columns = np.concatenate([np.stack([rows, columns], axis=1), np.array(wide, int).reshape(-1, 2)]).T
    if not rows.size:
        return rows, columns
    ending = row_slots[rows]
    counts = positions[rows] + columns + 1 - slots.prompt[ending] >= slots.min_tokens[ending]
    first = np.full(len(drawn), drawn.shape[1])
    np.minimum.at(first, rows[counts], columns[counts])
    stopped = (first < drawn.shape[1]).nonzero()[0]
    return stopped, first[stopped]


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
        if i < 0:
            continue  # surplus
        k, entries = _request(slots, row_slots[i]).params.logprobs, outputs[i].new_logprobs or []
        if k is None or len(entries) == len(outputs[i].new_token_ids):
            continue
        entry = TokenLogprobs(
            chosen=chosen[m],
            rank=rank[m],
            top_ids=logprobs.top_ids[m, :k].tolist(),
            top_values=logprobs.top_values[m, :k].tolist(),
        )
        outputs[i].new_logprobs = [*entries, entry]
