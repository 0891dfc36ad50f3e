"""Log probabilities of prompt tokens on their way out: in order, each once, whatever is computed again."""

from __future__ import annotations

import numpy as np

from engine.scheduling.request import Request
from engine.scheduling.slots import SlotTable
from engine.types.outputs import CoreOutput, TokenLogprobs
from engine.types.plan import PromptLogprobRows, StepPlan


def hit_limit(request: Request) -> int:
    """The most tokens that a request which generates may take from the prefix cache: at least one is computed, and the
    scores of prompt tokens that are still missing need the hidden states before them (vLLM likewise reads no cache for
    such requests)."""
    if request.params.prompt_logprobs is None or request.num_prompt_scored >= request.num_prompt_tokens - 1:
        return request.token_ids.size - 1
    return request.num_prompt_scored


def take_prompt_scores(
    plan: StepPlan, scores: PromptLogprobRows, slots: SlotTable, outputs: list[CoreOutput]
) -> list[CoreOutput]:
    """Put a step's scores into the outputs of their requests. A preempted request is computed again: what it had is
    dropped, as is what belongs to a request that has ended.

    Args:
        outputs: of the step, at most one a request; those of rows that drew a token.

    Returns:
        Further outputs, for requests that have none among these.
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
