"""Prefills: the chunks of prompts under way that a step computes.

`long_prefill_token_threshold` (vLLM's name) is the most tokens of one prompt that a step computes. A prompt that has
more left than that is long. The oldest long prompt comes first, so that it is never overtaken for ever; then what is
left of short ones; then further long prompts, which leave a threshold's worth of the budget to the queue while somebody
waits there: however many long prompts are under way, a short one behind them begins with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from engine.kv.matching import Hit
from engine.kv.swap import SwapIn
from engine.scheduling.batch import Batch, Chunk
from engine.scheduling.slots import DECODE, EMPTY, Request
from engine.scheduling.states import States

T = TypeVar("T")


class Prefills:
    """Chunks for the batch.

    Args:
        states: of all requests.
        threshold: most tokens of one prompt that a step computes; 0: no limit but the budget.
    """

    def __init__(self, states: States, threshold: int) -> None:
        self._states = states
        self.threshold = threshold

    def choose(self, batch: Batch, again: bool = False) -> None:
        """Add chunks of prompts under way.

        again: of those that have none in the batch yet; nobody else comes.
        """
        s, kv = self._states.slots, self._states.kv
        for request, wanted in self._sizes(batch, again):
            slot = np.array([request.slot])
            start = int(s.computed[request.slot])
            kv.leave_window(slot, s.computed[slot], s.last_step[slot])
            size = batch.pages.fit_chunk(request.slot, start, wanted)
            if size:
                self.add_chunk(batch, request, start, size)
            if size < wanted:
                batch.left_out = True  # those after it do not get ahead of it
                return

    def _sizes(self, batch: Batch, again: bool) -> list[tuple[Request, int]]:
        """The prompts under way that compute something in this step, in their order, and how many tokens."""
        states, s, threshold = self._states, self._states.slots, self.threshold
        under_way = list(states.prefilling.values())
        if again:
            chosen = {chunk.slot for chunk in batch.chunks}
            under_way = [request for request in under_way if request.slot not in chosen]
        remaining = [(r, int(s.placed[r.slot] - s.computed[r.slot])) for r in under_way]
        if not threshold:
            return _in_order(remaining, batch.budget)
        num_swapped = 0 if states.swapping is None else len(states.swapping)
        others_wait = not again and bool(s.num_free and (len(states.policy) or num_swapped))
        sizes = share_budget(remaining, batch.budget, threshold, others_wait)
        if others_wait and len(sizes) < len(remaining):
            # Those that leave their part of the budget to the queue do not leave it their pages.
            planned = {request.slot for request, _ in sizes}
            batch.reserved += sum(
                states.kv.pages_to_finish(request.slot, int(s.placed[request.slot]), threshold)
                for request in under_way
                if request.slot not in planned
            )
        return sizes

    def add_chunk(
        self,
        batch: Batch,
        request: Request,
        start: int,
        size: int,
        hit: Hit | None = None,
        swap_in: SwapIn | None = None,
    ) -> None:
        """Compute these known tokens, whose pages are there, in this step; `hit`, `swap_in`: as in `Chunk`."""
        states, s, slot, end = self._states, self._states.slots, request.slot, start + size
        complete = end == int(s.placed[slot])
        samples = complete and request.pooling is None
        reserved = batch.pages.chunk(slot, start, size, request.hashes, samples)
        s.computed[slot] = end
        if complete:
            s.placed[slot] += samples
            s.phase[slot] = DECODE if samples else EMPTY  # a prompt that is pooled waits for its result
            states.prompt_done(request)
        else:
            wanted = states.kv.pages_to_finish(slot, int(s.placed[slot]), size)
            batch.reserved += max(0, wanted - reserved)
        batch.budget -= size
        batch.chunks.append(Chunk(request, slot, start, size, samples, hit, swap_in))


def _in_order(remaining: Sequence[tuple[T, int]], budget: int) -> list[tuple[T, int]]:
    sizes = []
    for prompt, tokens in remaining:
        if not budget:
            break
        sizes.append((prompt, min(tokens, budget)))
        budget -= sizes[-1][1]
    return sizes


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
