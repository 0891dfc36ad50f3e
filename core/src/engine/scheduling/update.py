"""Taking a step's result in: tokens to their requests, full blocks to the prefix cache, who has ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.kv.manager import KVManager
from engine.scheduling.drafts import DraftSources
from engine.scheduling.slots import DECODE, Request, SlotTable
from engine.scheduling.structured import Ending, follow
from engine.types.errors import ContractError
from engine.types.outputs import CoreOutput, TokenLogprobs
from engine.types.plan import LogprobRows, PromptLogprobRows, StepPlan, StepResult
from engine.types.request import FinishReason

_NOWHERE = np.empty(0, np.intp)


# -- tokens -----------------------------------------------------------------------------------------------------------
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
    plan: StepPlan, result: StepResult, slots: SlotTable, kv: KVManager, drafts: DraftSources, *, pools: bool = False
) -> Accepted:
    """Accept the drawn tokens. A token of a request that has ended meanwhile is surplus and is dropped, and so is one
    behind the token that ends its request.

    Args:
        result: was checked by `engine.scheduling.results.check_result`.
        drafts: hear what became of theirs.
        pools: requests that pool may be among the rows.

    Raises ContractError: what was pooled does not fit the plan.
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
        for learning, tried in drafts.tried(plan, rows):
            learning.learn(row_slots[tried], (positions + kept)[tried], result.num_drafts[rows][tried], accepted[tried])
    known = positions + kept
    tokens = _remember(row_slots, positions, drawn, kept, slots)
    slots.known[row_slots] = known
    if kv.enable_prefix_caching:
        # Blocks count when they are both known and computed. A preempted request's slot has none to offer.
        kv.blocks.cache_full_blocks(
            row_slots, np.minimum(known, slots.computed[row_slots]), slots.requests, slots.tokens
        )

    ids = slots.request_ids
    outputs = [
        CoreOutput(request_id=ids[slot], new_token_ids=of_row)
        for slot, of_row in zip(row_slots.tolist(), tokens, strict=True)
    ]
    prompt_tokens = 0
    for i in (positions == prompts).nonzero()[0].tolist():
        request = slots.request(row_slots[i])
        prompt_tokens += request.num_prompt_tokens
        outputs[i].num_cached_tokens = request.num_cached_tokens
        outputs[i].queue_time = request.admitted_at - request.queued_at
        outputs[i].prefill_time = slots.now() - request.admitted_at
    if result.logprobs is not None:
        _add_logprobs(outputs, rows, row_slots, result.logprobs, plan.num_rows, slots)
    scores: list[CoreOutput] = []
    if result.prompt_logprobs is not None:
        scores = _take_prompt_scores(plan, result.prompt_logprobs, slots, outputs)

    ended = []
    over = known >= slots.limit[row_slots]
    over[stopped] = True
    for ending in endings:
        ending.write(outputs[ending.place])
        ended.append(slots.request(row_slots[ending.place]))
        over[ending.place] = False
    for i in over.nonzero()[0].tolist():
        request = slots.request(row_slots[i])
        token = outputs[i].new_token_ids[-1]
        if i not in by_stop:
            outputs[i].finish_reason = FinishReason.LENGTH
        else:
            outputs[i].finish_reason = FinishReason.STOP
            outputs[i].stop_reason = None if token in request.eos_token_ids else token
        ended.append(request)
    num_tokens = rows.size if plan.num_drafts is None and not endings else int(np.add.reduce(kept))
    accepted = Accepted(outputs, ended, prompt_tokens, num_tokens, scores)
    return _take_pooled(plan, result, slots, accepted) if pools else accepted


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
        k, entries = slots.request(row_slots[i]).params.logprobs, outputs[i].new_logprobs or []
        if k is None or len(entries) == len(outputs[i].new_token_ids):
            continue
        entry = TokenLogprobs(
            chosen=chosen[m],
            rank=rank[m],
            top_ids=logprobs.top_ids[m, :k].tolist(),
            top_values=logprobs.top_values[m, :k].tolist(),
        )
        outputs[i].new_logprobs = [*entries, entry]


# -- prompts: log probabilities, pooled vectors -----------------------------------------------------------------------
def _take_prompt_scores(
    plan: StepPlan, scores: PromptLogprobRows, slots: SlotTable, outputs: list[CoreOutput]
) -> list[CoreOutput]:
    """Put a step's scores into the outputs of their requests. A preempted request is computed again: what it had is
    dropped, as is what belongs to a request that has ended.

    Args:
        outputs: of the step, at most one a request; those of rows that drew a token.

    Returns further outputs, for requests that have none among these.
    """
    more: list[CoreOutput] = []
    of_request = {output.request_id: output for output in outputs}
    rows, first = np.unique(scores.row, return_index=True)
    ends = np.append(first[1:], scores.row.size)
    for row, start, end in zip(rows.tolist(), first.tolist(), ends.tolist(), strict=True):
        slot = int(plan.slot_of_row[row])
        request = slots.requests[slot]
        if request is None or not slots.accepts[slot]:
            continue
        k = request.params.prompt_logprobs
        assert k is not None, "the runner scores prompts that ask for it"
        skip = request.num_prompt_scored + 1 - int(scores.position[start])
        assert skip >= 0, "the scores of a prompt have a gap"
        start = min(start + skip, end)
        if start == end:
            continue
        request.num_prompt_scored += end - start
        output = of_request.get(request.request_id)
        if output is None:
            output = CoreOutput(request_id=request.request_id)
            more.append(output)
        columns = (a[start:end].tolist() for a in (scores.chosen, scores.rank, scores.top_ids, scores.top_values))
        output.new_prompt_logprobs = [
            TokenLogprobs(chosen=chosen, rank=rank, top_ids=ids[:k], top_values=values[:k])
            for chosen, rank, ids, values in zip(*columns, strict=True)
        ]
    return more


def _take_pooled(plan: StepPlan, result: StepResult, slots: SlotTable, accepted: Accepted) -> Accepted:
    """Add what a step pooled to its news. What belongs to a request that has ended is dropped. A preempted request is
    computed again: vectors of tokens that it had sent are dropped, and a result that still comes is its result.

    Raises ContractError: a row whose prompt is computed has no result, or the results do not fit the plan.
    """
    outputs: list[CoreOutput] = []
    ended: list[Request] = []
    pooled, given = result.pooled, dict[int, tuple[int, np.ndarray]]()  # by row: (start, data)
    if pooled is not None:
        places = zip(pooled.start.tolist(), pooled.data, strict=True)
        given = dict(zip(pooled.row.tolist(), places, strict=True))
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
        elif not done or data.ndim != (2 if request.pooling.task == "token_classify" else 1):
            raise _misfit(plan, row)
        output = CoreOutput(request_id=request.request_id, pooled=data)
        outputs.append(output)
        if done:
            output.finish_reason = FinishReason.STOP
            output.num_cached_tokens = request.num_cached_tokens
            output.queue_time = request.admitted_at - request.queued_at
            output.prefill_time = slots.now() - request.admitted_at
            ended.append(request)
    return accepted._replace(
        outputs=accepted.outputs + outputs,
        ended=accepted.ended + ended,
        prompt_tokens=accepted.prompt_tokens + sum(request.num_prompt_tokens for request in ended),
    )


def _misfit(plan: StepPlan, row: int) -> ContractError:
    return ContractError(
        f"what step {plan.step_id} pooled",
        f"row {row} has no result, or one of another form than its request asked for",
        "choose another executor or platform driver and tell its author",
        point="executor",
    )
