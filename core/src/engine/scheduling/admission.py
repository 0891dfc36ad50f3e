"""Admission: what is refused at once, who gets a slot, and how much of it the prefix cache has."""

from __future__ import annotations

from engine.kv.matching import Hit, RunningTokens
from engine.kv.swap import SwapIn
from engine.scheduling.batch import Batch
from engine.scheduling.prefill import Prefills
from engine.scheduling.slots import Request, Status
from engine.scheduling.states import States
from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine.types.request import EngineRequest


class Admission:
    """The way of requests into the queue, and from the queue into slots.

    Args:
        states: of all requests.
        prefills: plan the first chunk of those that enter a slot.
        max_model_len: most tokens of one request, prompt and output.
        whole_prompts: a prompt is computed in one step.

    Attributes:
        pools: some request has pooled, or will.
        prefix_queries, prefix_hits: tokens looked for in the prefix cache, and found, since start.
    """

    def __init__(self, states: States, prefills: Prefills, max_model_len: int, whole_prompts: bool) -> None:
        self._states = states
        self._prefills = prefills
        self._max_model_len = max_model_len
        self._whole_prompts = whole_prompts
        self._running_tokens = RunningTokens(states.slots.tokens, states.slots.known)
        self.pools = False
        self.prefix_queries = 0
        self.prefix_hits = 0

    # -- into the queue -----------------------------------------------------------------------------------------------
    def add(self, request: EngineRequest) -> None:
        """See `engine.scheduling.scheduler.Scheduler.add`."""
        states, kv = self._states, self._states.kv
        self._check(request)
        n, pools = len(request.prompt_token_ids), request.pooling is not None
        self.pools = self.pools or pools
        most = 0 if pools else request.params.max_tokens
        limit = self._max_model_len if most is None else min(n + most, self._max_model_len)
        new = Request(request, states.slots, limit, kv.root_hash(request.cache_salt, encoder=request.encoder))
        states.requests[new.request_id] = new
        if new.timeout is not None:
            states.deadlines.add(new, new.timeout)
        if not kv.fits_at_all(n, new.encoder):
            states.fail_too_small(new)
        elif states.gates.begin(new):
            new.status = Status.PENDING
        else:
            states.enter_queue(new)

    def _check(self, request: EngineRequest) -> None:
        asked = f"add request {request.request_id!r}"
        n, pools = len(request.prompt_token_ids), request.pooling is not None
        if request.request_id in self._states.requests:
            raise InvalidRequestError(asked, "an unfinished request has this id", "use another id")
        if n < 1:
            raise InvalidRequestError(asked, "its prompt has no tokens")
        if n + (not pools) > self._max_model_len:
            more = "" if pools else "with at least one token to generate "
            raise PromptTooLongError(
                f"a prompt of {n} tokens", f"{more}it exceeds max_model_len={self._max_model_len}", "shorten the prompt"
            )
        if request.params.structured_outputs is not None and self._states.constraints is None:
            asked += " with structured_outputs"
            raise InvalidRequestError(asked, "this engine has no grammar driver", "start it with --grammar DRIVER")
        self._states.kv.cross.check(request.encoder)

    # -- into slots ---------------------------------------------------------------------------------------------------
    def resume(self, batch: Batch) -> bool:
        """Bring swapped requests back, by the same rule as `admit`. False: one of them still waits, and before it
        nobody new is admitted."""
        states, swapping = self._states, self._states.swapping
        if swapping is None:
            return True
        while (request := swapping.queue.peek()) is not None:
            if not states.kv.fits_at_all(request.token_ids.size, request.encoder):
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
            if not kv.fits_at_all(n, request.encoder):
                states.fail_too_small(request)
                continue
            hit = batch.pages.match(request.sequence(request.token_ids), hit_limit(request), self._running_tokens)
            if self._whole_prompts and n > batch.budget:
                return
            size = self._room(batch, request, hit)
            if not size and hit.partial is not None:
                hit = hit.whole_blocks()  # copying holds one page more
                size = self._room(batch, request, hit)
            if not size:
                return
            states.policy.pop()
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = hit.num_tokens
                request.admitted_at = states.slots.now()
                self.prefix_hits += hit.num_tokens
                self.prefix_queries += n if kv.enable_prefix_caching else 0
            self._enter(batch, request, size, hit)

    def _room(self, batch: Batch, request: Request, hit: Hit) -> int:
        """Tokens that a request that is to be admitted may compute; 0: it does not find the pages that it will want."""
        kv, n, start = self._states.kv, request.token_ids.size, hit.num_tokens
        chunk = min(n - start, batch.budget, self._prefills.threshold or n)
        size = batch.pages.fit_chunk(-1, start, chunk, hit)
        if self._states.running and size:
            pages = kv.pages_for_prompt(n, chunk, hit)
            return size if pages + batch.reserved <= batch.pages.num_available else 0
        return size

    def _enter(self, batch: Batch, request: Request, size: int, hit: Hit, swap_in: SwapIn | None = None) -> None:
        """Give a request a slot, with what the cache (or the swap tier) has of it, and its first chunk."""
        states = self._states
        states.fast_path.end()
        request.status = Status.RUNNING
        slot = states.slots.enter(request, hit.num_tokens)
        states.running[request.request_id] = request
        states.prefilling[request.request_id] = request
        states.drafts.enter(slot)
        batch.pages.enter(slot, request.sequence(request.token_ids), hit, swap_in)
        self._prefills.add_chunk(batch, request, hit.num_tokens, size, hit, swap_in)


def hit_limit(request: Request) -> int:
    """The most tokens that a request may take from the prefix cache.

    One that generates computes its last token at least, and the scores of prompt tokens that are still missing need the
    hidden states before them (vLLM likewise reads no cache for such requests). Where a request pools, the last token's
    hidden state needs that token computed; the mean and the vectors of single tokens need all of them, "cls" the first.
    """
    if (pooling := request.pooling) is not None:
        last_alone = pooling.task != "token_embed" and pooling.pooling_type == "last"
        return request.token_ids.size - 1 if last_alone else 0
    if request.params.prompt_logprobs is None or request.num_prompt_scored >= request.num_prompt_tokens - 1:
        return request.token_ids.size - 1
    return request.num_prompt_scored
