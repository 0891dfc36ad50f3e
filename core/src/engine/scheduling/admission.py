"""Prompts: the chunks that a step computes of those under way, and who of those that wait gets a slot, and how much of
it the prefix cache has.

`long_prefill_token_threshold` (vLLM's name) is the most tokens of one prompt that a step computes. A prompt that has
more left than that is long. The oldest long prompt comes first, so that it is never overtaken for ever; then what is
left of short ones; then further long prompts, which leave a threshold's worth of the budget to the queue while somebody
waits there: however many long prompts are under way, a short one behind them begins with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from engine.kv.matching import Hit, RunningTokens
from engine.kv.reuse import Reused
from engine.kv.swap import SwapIn, fill_blocks
from engine.scheduling.batch import Batch, Chunk
from engine.scheduling.loading import Connector
from engine.scheduling.slots import DECODE, EMPTY, Request, Status
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
            return share_budget(remaining, batch.budget, states.max_model_len, others_wait=False)
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
        source: Connector | None = None,
    ) -> None:
        """Compute these known tokens, whose pages are there, in this step; for the others see `Chunk`."""
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
        batch.chunks.append(Chunk(request, slot, start, size, samples, hit, swap_in, source))


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


class Admission:
    """The way of requests from the queue into slots.

    Args:
        states: of all requests.
        prefills: plan the first chunk of those that enter a slot.
        whole_prompts: a prompt is computed in one step.

    Attributes:
        prefix_queries, prefix_hits, reused_tokens: looked for in the prefix cache, found, reused behind that, so far.
    """

    def __init__(self, states: States, prefills: Prefills, whole_prompts: bool) -> None:
        self._states = states
        self._prefills = prefills
        self._whole_prompts = whole_prompts
        self._running_tokens = RunningTokens(states.slots.tokens, states.slots.known)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.reused_tokens = 0

    def resume(self, batch: Batch) -> bool:
        """Bring swapped requests back, by the same rule as `admit`. False: one of them still waits, and before it
        nobody new is admitted."""
        states, swapping = self._states, self._states.swapping
        if swapping is None:
            return True
        while (request := swapping.queue.peek()) is not None:
            if not states.kv.fits_at_all(request.token_ids.size):
                states.fail_too_small(request)
                continue
            if not batch.budget or not states.slots.num_free:
                return False
            swap_in = swapping.find(request)
            size = self._room(batch, request, swap_in.hit)
            if not size:
                return False
            swapping.queue.pop()
            self._enter(batch, request, size, swap_in.hit, swap_in)
        return True

    def admit(self, batch: Batch) -> None:
        """Take requests from the queue as long as budget, slots and pages last. A request is admitted only where its
        whole prompt finds pages, beside those that prompts under way will want: a half-computed prompt that gets stuck
        would hold pages for nothing."""
        states, kv = self._states, self._states.kv
        while batch.budget and states.slots.num_free and (request := states.policy.peek()) is not None:
            n = request.token_ids.size
            if not kv.fits_at_all(n):
                states.fail_too_small(request)
                continue
            most = hit_limit(request)
            hit = batch.pages.match(request.sequence(request.token_ids), most, self._running_tokens)
            if self._whole_prompts and n > batch.budget:
                return
            swap_in, source = None, None
            if (offer := states.connectors.lookup(request, hit, most)) is not None:
                if offer.asynchronous:
                    available = batch.pages.num_available - batch.reserved
                    if not states.connectors.begin_load(request, offer, available):
                        return
                    states.policy.pop()
                    continue
                swap_in, source = fill_blocks(kv, offer.local, offer.end), offer.connector
                hit = swap_in.hit
            size = self._room(batch, request, hit)
            if not size and hit.partial is not None:
                hit = hit.whole_blocks()  # copying holds one page more
                size = self._room(batch, request, hit)
            if not size:
                return
            states.policy.pop()
            first = request.num_cached_tokens < 0
            if first:
                request.num_cached_tokens = hit.num_tokens
                request.admitted_at = states.slots.now()
            loads = self._enter(batch, request, size, hit, swap_in, source)
            if first:
                for connector, loaded in loads:
                    if connector is not None:
                        connector.counts["hit_tokens"] += loaded
                self.prefix_hits += hit.num_tokens - sum(loaded for _, loaded in loads)
                self.prefix_queries += n if kv.enable_prefix_caching else 0
                self.reused_tokens += 0 if kv.reuses is None else kv.reuses.tokens_of(request.slot)

    def _room(self, batch: Batch, request: Request, hit: Hit) -> int:
        """Tokens that a request that is to be admitted may compute; 0: it does not find the pages that it will want, or
        no room in the step for what its encoder computes."""
        kv, n, start = self._states.kv, request.token_ids.size, hit.num_tokens
        if (budget := batch.budget - request.num_encoder_tokens) < 1:
            return 0
        chunk = min(n - start, budget, self._prefills.threshold or n)
        size = batch.pages.fit_chunk(-1, start, chunk, hit)
        if self._states.running and size:
            pages = kv.pages_for_prompt(n, chunk, hit)
            return size if pages + batch.reserved <= batch.pages.num_available else 0
        return size

    def _enter(
        self,
        batch: Batch,
        request: Request,
        size: int,
        hit: Hit,
        swap_in: SwapIn | None = None,
        source: Connector | None = None,
    ) -> list[tuple[Connector | None, int]]:
        """Give a request a slot, with what the cache (or a connector) has of it, and its first chunk. Returns the
        tokens that are or were loaded for it, by whom."""
        states = self._states
        states.fast_path.end()
        request.status = Status.RUNNING
        batch.budget -= request.num_encoder_tokens
        slot = states.slots.enter(request, hit.num_tokens)
        states.running[request.request_id] = request
        states.prefilling[request.request_id] = request
        states.drafts.enter(slot)
        reused = None
        if swap_in is None:
            reused = self._reuse(batch, request, size, hit)
            request.reuses = reused is not None
        batch.pages.enter(slot, request.sequence(request.token_ids), hit, swap_in, reused)
        if reused is not None:
            states.connectors.reuses(request, reused.blocks)
        filled = 0 if swap_in is None else swap_in.num_filled * states.kv.block_size
        arrived = states.connectors.entered(request, hit.num_whole - filled, swap_in)
        self._prefills.add_chunk(batch, request, hit.num_tokens, size, hit, swap_in, source)
        return [(source, filled), arrived]

    def _reuse(self, batch: Batch, request: Request, size: int, hit: Hit) -> Reused | None:
        """What a request reuses behind its cached prefix, in pages that nobody who is admitted will want. Nothing where
        all its tokens' hidden states are wanted, nor where another engine is to get what it has."""
        kv, n = self._states.kv, request.token_ids.size
        if kv.reuses is None or request.pooling or request.kv_transfer or hit_limit(request) < n - 1:
            return None
        spare = batch.pages.num_available - batch.reserved - kv.pages_for_prompt(n, size, hit)
        return kv.reuses.find(request.sequence(request.token_ids), hit.num_tokens, n - 1, spare)


def hit_limit(request: Request) -> int:
    """The most tokens that a request may take from the prefix cache.

    One that generates computes its last token at least, and the scores of prompt tokens that are still missing need the
    hidden states before them (vLLM likewise reads no cache for such requests). Where a request pools, the last token's
    hidden state needs that token computed; the mean and the vectors of single tokens need all of them, "cls" the first.
    """
    if (pooling := request.pooling) is not None:
        return request.token_ids.size - 1 if pooling.pooling_type == "last" else 0
    if request.params.prompt_logprobs is None or request.num_prompt_scored >= request.num_prompt_tokens - 1:
        return request.token_ids.size - 1
    return request.num_prompt_scored
