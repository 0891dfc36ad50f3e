"""How prompts under way share a step's budget, where long ones are computed in small chunks.

`long_prefill_token_threshold` (vLLM's name) is the most tokens of one prompt that a step computes. A prompt that has
more left than that is long. The oldest long prompt comes first, so that it is never overtaken for ever; then what is
left of short ones; then further long prompts, which leave a threshold's worth of the budget to the queue while somebody
waits there: however many long prompts are under way, a short one behind them begins with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def share_budget(
    remaining: Sequence[tuple[T, int]], budget: int, threshold: int, others_wait: bool
) -> list[tuple[T, int]]:
    """Tokens for prompts under way: (prompt, size at least 1), in the order in which they are to be planned.

    Args:
        remaining: (prompt, tokens that it still has to compute, at least 1), in order of admission.
        budget: tokens for all of them.
        threshold: the most of one prompt, at least 1.
        others_wait: whether further requests could be admitted if budget is left.
    """
    long = [entry for entry in remaining if entry[1] > threshold]
    short = [entry for entry in remaining if entry[1] <= threshold]
    shares: list[tuple[T, int]] = []
    for prompt, tokens in (*long[:1], *short):
        if size := min(tokens, threshold, budget):
            shares.append((prompt, size))
            budget -= size
    if others_wait:
        budget -= threshold
    for prompt, _ in long[1:]:
        if budget <= 0:
            break
        size = min(threshold, budget)
        shares.append((prompt, size))
        budget -= size
    return shares
