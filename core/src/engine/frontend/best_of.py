"""The best of several completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.types.outputs import CompletionOutput
from engine.types.params import SamplingParams
from engine.types.request import FinishReason


def best_of(completions: Sequence[CompletionOutput], params: SamplingParams) -> tuple[list[CompletionOutput], int]:
    """The `n` completions with the largest `cumulative_logprob`, best first, numbered anew; those that ended with an
    error come last, and among equals the one with the lower index comes first.

    Returns:
        They, and the number of tokens of those left out.
    """

    def rank(completion: CompletionOutput) -> tuple[bool, float]:
        return completion.finish_reason == FinishReason.ERROR, -(completion.cumulative_logprob or 0.0)

    order = sorted(completions, key=rank)
    chosen = [
        replace(completion, index=index, logprobs=None if params.logprobs is None else completion.logprobs)
        for index, completion in enumerate(order[: params.n])
    ]
    return chosen, sum(len(completion.token_ids) for completion in order[params.n :])
