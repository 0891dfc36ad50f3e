"""The scheduler: which requests compute how many tokens in the next step.

One budget, no phases: a prompt's chunk, a prefix hit, a decode token and a resumed request are the same arithmetic on
the number of computed tokens. Decodes come first, then prompts under way, then new requests in the policy's order.

Plans are made ahead: a token that no result has brought yet is a placeholder, counted in `placed`. A request is never
planned beyond its known length; one that ends earlier (end of sequence) leaves a surplus token that is dropped.

A request with a constraint (structured outputs) is planned ahead as any other; the masks of its steps follow, see
`constraints`.

With a drafter, a decode may compute drafts after its token. How many of them stay is known only when the result is
back, and until then that request is not planned again; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.kv import restoring
from engine.kv.manager import KVManager
from engine.kv.matching import Hit
from engine.kv.tails import RunningTokens
from engine.scheduling.batch import Batch, Chunk, build_plan
from engine.scheduling.constraints import Constraints, unserved
from engine.scheduling.contract import broken_logits, check_result
from engine.scheduling.deadlines import Deadlines, timed_out
from engine.scheduling.drafts import choose_drafts
from engine.scheduling.failed_loads import spoilt
from engine.scheduling.integrity import check_integrity
from engine.scheduling.jump_ahead import JumpAhead
from engine.scheduling.long_prompts import share_budget
from engine.scheduling.pooled import pooled_hit_limit, take_pooled
from engine.scheduling.preemption import Preemptions, oldest_that_fit
from engine.scheduling.prompt_scores import hit_limit
from engine.scheduling.refusals import check_prompt, too_small
from engine.scheduling.request import Request, Status
from engine.scheduling.siblings import Siblings
from engine.scheduling.slots import DECODE, EMPTY, SlotTable
from engine.scheduling.speculation import Speculation
from engine.scheduling.steady import SteadyDecodes
from engine.scheduling.swapping import Return, Swapping
from engine.scheduling.update import accept
from engine.types.errors import EngineError, InvalidRequestError
from engine.types.outputs import CoreOutput
from engine.types.plan import BROKEN, StepPlan, StepResult
from engine.types.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from engine.interfaces.scheduling_policy import SchedulingPolicy

logger = logging.getLogger(__name__)


class Scheduler:
    """All unfinished requests and their way through waiting, slots and pages.

    Args:
        kv: the pages.
        policy: the waiting queue's order, and who is preempted.
        max_num_seqs: slots.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: most tokens of one request, prompt and output.
        speculation: how many drafts requests get; None where there is no drafter.
        long_prefill_token_threshold: most tokens of one prompt that a step computes; 0: no limit of its own.
        swapping: where preempted requests leave their pages; None: they are computed again.
        constraints: those of requests with structured outputs; None where there is no grammar driver.
        jump_ahead: over what constraints force; None: token by token.
        whole_prompts: a prompt is computed in one step; `max_num_batched_tokens` is at least `max_model_len` then.
        vocab_size: a result with another token ends the engine; None: not checked.

    Attributes:
        outstanding: plans that were made and whose results have not come back, oldest first.
        running: requests in slots, in order of admission.
        prefilling: those of them that still have known tokens to compute.
        draining: preempted requests named by a step under way.
        deadlines: of the requests that have one.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        speculation: Speculation | None = None,
        long_prefill_token_threshold: int = 0,
        swapping: Swapping | None = None,
        constraints: Constraints | None = None,
        jump_ahead: JumpAhead | None = None,
        whole_prompts: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.swapping, self.vocab_size = swapping, vocab_size
        self.preemptions = Preemptions()
        self.long_prefill_token_threshold, self.whole_prompts = long_prefill_token_threshold, whole_prompts
        self.speculation, self.constraints, self.jump_ahead = speculation, constraints, jump_ahead
        self.kv, self.policy = kv, policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.slots = SlotTable(max_num_seqs, max_model_len)
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.draining: list[Request] = []
        self.siblings = Siblings()
        self.deadlines = Deadlines()
        self.outstanding: deque[StepPlan] = deque()
        self.last_step = 0
        self.done_step = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._notices: list[CoreOutput] = []
        self._running_tokens = RunningTokens(self.slots.tokens, self.slots.known)
        self._steady = SteadyDecodes(self.slots, kv, vocab_size)
        self._pools = False  # some request has pooled, or will

    # -- requests come and go -----------------------------------------------------------------------------------------
    def add(self, request: EngineRequest) -> None:
        """Queue a request. One whose prompt can never fit the KV cache ends at once, with an error in the outputs.

        Raises:
            InvalidRequestError: its id is in use, it has no tokens, or an encoder input that does not fit the model.
            PromptTooLongError: no token could be generated within `max_model_len`; one that pools needs room for none.
        """
        n = len(request.prompt_token_ids)
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"add request {request.request_id!r}", "an unfinished request has this id", "use another id"
            )
        check_prompt(request, self.max_model_len)
        pools = request.pooling is not None
        if request.params.structured_outputs is not None and self.constraints is None:
            raise unserved(request)
        self.kv.check_encoder(request.encoder)
        self._pools = self._pools or pools
        most = 0 if pools else request.params.max_tokens
        limit = self.max_model_len if most is None else min(n + most, self.max_model_len)
        new = Request(request, self.slots, limit, self.kv.root_hash(request.cache_salt, encoder=request.encoder))
        self.requests[new.request_id] = new
        if new.timeout is not None:
            self.deadlines.add(new, new.timeout)
        if not self.kv.fits_at_all(n, new.encoder):
            self._fail(new, too_small(self.kv, new))
        elif self.constraints is not None and new.params.structured_outputs is not None:
            new.status = Status.COMPILING
            self.constraints.compile(new)
        else:
            self._enter_queue(new)

    def _enter_queue(self, request: Request) -> None:
        """A request that has all it needs waits for a slot, or for a sibling."""
        request.status = Status.HELD
        if not self.kv.enable_prefix_caching or self.siblings.join(request):
            request.status = Status.WAITING
            self.policy.push(request)

    def _take_compiled(self, constraints: Constraints) -> None:
        for request, error in constraints.take_compiled():
            if error is None:
                self._enter_queue(request)
            else:
                self._fail(request, error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; ids that are not (or no longer) known are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._notices.append(CoreOutput(request_id=request_id, finish_reason=FinishReason.ABORT))
                self._end(request)

    def fail_all(self, error: EngineError) -> None:
        """End all requests with an error: the engine is dead, and pages and slots no longer matter."""
        self._notices += [_error_output(request_id, error) for request_id in self.requests]
        for of_state in (self.requests, self.running, self.prefilling, self.draining, self.outstanding):
            of_state.clear()
        self.deadlines.clear()
        if self.swapping is not None:
            self.swapping.clear()
        if self.constraints is not None:
            self.constraints.shutdown()

    def take_notices(self) -> list[CoreOutput]:
        """Outputs of requests that ended between results, since the last call."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def has_work(self) -> bool:
        """Something is unfinished, under way, or has to be told."""
        return bool(self.requests or self.outstanding or self._notices)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, swapped ones among them."""
        return len(self.requests) - len(self.running)

    @property
    def num_swapped(self) -> int:
        """Requests whose pages the swap tier keeps."""
        return 0 if self.swapping is None else len(self.swapping)

    @property
    def num_preemptions(self) -> int:
        """Since start, by all modes."""
        return self.preemptions.num_swapped + self.preemptions.num_recomputed

    # -- plan ---------------------------------------------------------------------------------------------------------
    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can be planned before a result comes back (or there is nothing)."""
        if self.deadlines:
            for request in self.deadlines.late():
                self._fail(request, timed_out(request))
        if self.constraints is not None and self.constraints.num_compiling:
            self._take_compiled(self.constraints)
        if self._steady.num_plans and not (self.slots.num_free and len(self.policy)):
            self.last_step += 1
            self.outstanding.append(self._steady.next_plan(self.last_step))
            return self.outstanding[-1]
        while True:
            preempted = self.num_preemptions
            batch = Batch(self.max_num_batched_tokens)
            self._choose_decodes(batch)
            if self.prefilling and not batch.left_out:
                self._choose_prefills(batch)
            if not batch.left_out and not self.draining and self._resume(batch):
                self._admit(batch)
            if self.long_prefill_token_threshold and batch.budget and not batch.left_out:
                self._choose_prefills(batch, again=True)  # what was kept for the queue, and not taken
            if not batch.empty:
                break
            if self.outstanding:
                return None
            # A pass that preempted everything it had chosen has made room: the next one sees it.
            if self.num_preemptions == preempted and not self._unblock():
                return None
        self.last_step += 1
        plan = build_plan(self.last_step, batch, self.slots, self.kv, self.swapping)
        self.outstanding.append(plan)
        if plan.num_decodes == len(self.running) and self._are_free(plan):
            self._steady.begin(plan)
        return plan

    def _are_free(self, plan: StepPlan) -> bool:
        """Whether nothing but tokens decides how the plan's rows, all that run, go on."""
        extras = self.speculation is not None or self.swapping is not None or self.slots.num_waits
        return not (extras or plan.masks_follow or self.slots.num_matched or self.draining)

    def _choose_decodes(self, batch: Batch) -> None:
        s = self.slots
        can = (s.phase == DECODE) & (s.placed < s.limit)
        if self.speculation is not None or self.jump_ahead is not None:
            can &= s.drafts == 0
        ready = can.nonzero()[0].astype(np.int32)
        if not ready.size:
            return
        if s.num_waits:
            now = ~s.waits[ready] | (s.known[ready] == s.placed[ready])
            # Theirs when they come back.
            batch.budget = max(0, batch.budget - ready.size + int(np.count_nonzero(now)))
            ready = ready[now]
        if ready.size > batch.budget:
            # A request begins to decode with a token of some step's budget, so without drafts there are never more of
            # them. While some wait for what became of their drafts, others begin: then those wait longest go first.
            ready = np.sort(ready[np.argsort(s.last_step[ready], kind="stable")[: batch.budget]])
        if not ready.size:
            return
        positions = s.computed[ready]
        self.kv.leave_window(ready, positions, s.last_step[ready])
        room, shared = batch.budget - ready.size, bool(self.prefilling or len(self.policy))
        sources = self.speculation, self.jump_ahead, self.constraints
        drafts, batch.given = choose_drafts(ready, s, room, shared, *sources)
        if drafts is not None:
            need = self.kv.extend_need(ready, positions + 1 + drafts)
            if np.add.reduce(need, axis=None) > self.kv.num_available:
                drafts = None
        if drafts is None:
            need = self.kv.decode_need(ready, positions)
        while drafts is None and np.count_nonzero(need) > self.kv.num_available:
            batch.left_out = True
            # Pages come back without preemption where a step under way still names some, or computes drafts.
            if self.kv.pool.num_pending or len(self.running) == 1 or s.drafts.any():
                keep = oldest_that_fit(s.order[ready], need, self.kv.num_available)
            else:
                self._preempt(self._victim())
                keep = s.phase[ready] != EMPTY
            ready, positions, need = ready[keep], positions[keep], need[:, keep]
        s.computed[ready] = positions + 1
        s.placed[ready] += 1
        self.kv.promise_decodes(need)
        batch.decodes, batch.positions, batch.need = ready, positions, need
        batch.budget -= ready.size
        if drafts is not None:
            s.drafts[ready] = batch.drafts = drafts
            batch.budget -= int(np.add.reduce(drafts))

    def _choose_prefills(self, batch: Batch, again: bool = False) -> None:
        s = self.slots
        for request, wanted in self._prefill_sizes(batch, again):
            slot = np.array([request.slot])
            start = int(s.computed[request.slot])
            self.kv.leave_window(slot, s.computed[slot], s.last_step[slot])
            size = self.kv.fit_chunk(request.slot, start, wanted)
            if size:
                self._add_chunk(batch, request, start, size, None)
            if size < wanted:
                batch.left_out = True  # those after it do not get ahead of it
                return

    def _prefill_sizes(self, batch: Batch, again: bool) -> list[tuple[Request, int]]:
        """The prompts under way that compute something in this step, in their order, and how many tokens.

        again: those that have no part in the batch yet, and nobody else comes.
        """
        s, budget, threshold = self.slots, batch.budget, self.long_prefill_token_threshold
        under_way = list(self.prefilling.values())
        if again:
            chosen = {chunk.slot for chunk in batch.chunks}
            under_way = [request for request in under_way if request.slot not in chosen]
        remaining = [(r, int(s.placed[r.slot] - s.computed[r.slot])) for r in under_way]
        if threshold:
            others_wait = not again and bool(s.num_free and (len(self.policy) or self.num_swapped))
            sizes = share_budget(remaining, budget, threshold, others_wait)
            if others_wait and len(sizes) < len(remaining):
                # Those that leave their part of the budget to the queue do not leave it their pages.
                planned = {request.slot for request, _ in sizes}
                batch.reserved += sum(
                    self.kv.pages_to_finish(request.slot, int(s.placed[request.slot]), threshold)
                    for request in under_way
                    if request.slot not in planned
                )
            return sizes
        sizes = []
        for request, tokens in remaining:
            if not budget:
                break
            sizes.append((request, min(tokens, budget)))
            budget -= sizes[-1][1]
        return sizes

    def _resume(self, batch: Batch) -> bool:
        """Bring swapped requests back, by the same rule as `_admit`. False: one of them still waits, and before it
        nobody new is admitted."""
        if self.swapping is None:
            return True
        while (head := self.swapping.queue.peek()) is not None:
            request = cast(Request, head)
            n = request.token_ids.size
            if not self.kv.fits_at_all(n, request.encoder):
                self._fail(request, too_small(self.kv, request))
                continue
            if not batch.budget or not self.slots.num_free:
                return False
            back = self.swapping.prepare(request)
            hit = back.restored.hit
            size = self._room(batch, request, hit)
            if not size:
                self.swapping.put_back(back)
                return False
            self.swapping.take(back)
            self._enter(batch, request, size, hit, back)
        return True

    def _admit(self, batch: Batch) -> None:
        """Take requests from the queue as long as budget, slots and pages last. A request is admitted only where its
        whole prompt finds pages, beside those that prompts under way will want: a half-computed prompt that gets stuck
        would hold pages for nothing."""
        while batch.budget and self.slots.num_free and (head := self.policy.peek()) is not None:
            request = cast(Request, head)
            n = request.token_ids.size
            if not self.kv.fits_at_all(n, request.encoder):
                self._fail(request, too_small(self.kv, request))
                continue
            hit = self._match(request)
            if self.whole_prompts and n > batch.budget:
                return
            size = self._room(batch, request, hit)
            if not size and hit.tail is not None:
                hit = hit.without_tail()  # copying holds one page more
                size = self._room(batch, request, hit)
            if not size:
                return
            start = hit.num_tokens
            self.policy.pop()
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = start
                request.admitted_at = time.monotonic()
                self.prefix_hits += start
                self.prefix_queries += n if self.kv.enable_prefix_caching else 0
            self._enter(batch, request, size, hit)

    def _enter(self, batch: Batch, request: Request, size: int, hit: Hit, back: Return | None = None) -> None:
        """Give a request a slot, with what the cache (or the swap tier) has of it, and its first chunk."""
        self._steady.end()
        request.status = Status.RUNNING
        slot = self.slots.enter(request, hit.num_tokens)
        self.running[request.request_id] = request
        self.prefilling[request.request_id] = request
        if back is None:
            self.kv.begin_slot(slot, hit)
        else:
            restoring.begin(self.kv, slot, back.restored)
        for drafts in (self.speculation, self.jump_ahead):
            if drafts is not None:
                drafts.enter(slot)
        self._add_chunk(batch, request, hit.num_tokens, size, hit, back)

    def _room(self, batch: Batch, request: Request, hit: Hit) -> int:
        """Tokens that a request that is to be admitted may compute; 0: it does not find the pages that it will want."""
        n, start = request.token_ids.size, hit.num_tokens
        chunk = min(n - start, batch.budget, self.long_prefill_token_threshold or n)
        size = self.kv.fit_chunk(-1, start, chunk, hit)
        if self.running and size:
            pages = self.kv.pages_for_prompt(n, chunk, hit)
            return size if pages + batch.reserved <= self.kv.num_available else 0
        return size

    def _match(self, request: Request) -> Hit:
        most = pooled_hit_limit(request) if request.pooling is not None else hit_limit(request)
        return self.kv.match(request.sequence(request.token_ids), most, self._running_tokens)

    def _add_chunk(
        self, batch: Batch, request: Request, start: int, size: int, hit: Hit | None, back: Return | None = None
    ) -> None:
        s, slot, end = self.slots, request.slot, start + size
        complete = end == int(s.placed[slot])
        samples = complete and request.pooling is None
        promised = self.kv.promise_chunk(slot, start, size, request.hashes, hit)
        s.computed[slot] = end
        if complete:
            s.placed[slot] += samples
            s.phase[slot] = DECODE if samples else EMPTY  # a prompt that is pooled waits for its result
            del self.prefilling[request.request_id]
            for sibling in reversed(self.siblings.prompt_done(request)):
                self._queue(sibling)
        else:
            wanted = self.kv.pages_to_finish(slot, int(s.placed[slot]), size)
            batch.reserved += max(0, wanted - promised)
        batch.budget -= size
        batch.chunks.append(Chunk(request, slot, start, size, samples, hit if back is None else None, back))

    def _unblock(self) -> bool:
        """Nothing can be planned and nothing is under way: make room. False where there is nobody to make room for."""
        running = list(self.running.values())
        if len(running) > 1:
            self._preempt(self._victim())
            return True
        swapped = None if self.swapping is None else self.swapping.queue.peek()
        stuck = running[0] if running else cast("Request | None", swapped or self.policy.peek())
        if stuck is not None:
            self._fail(stuck, too_small(self.kv, stuck))
        return stuck is not None

    # -- results ------------------------------------------------------------------------------------------------------
    def update(self, result: StepResult) -> list[CoreOutput]:
        """Take in the result of the oldest plan that is outstanding.

        Raises:
            ContractError: it is another step's, or does not fit the plan.
        """
        if (steady := self._steady.accept(self.outstanding[0], result)) is not None:
            self._step_done(self.outstanding.popleft())
            self.generation_tokens += len(steady)
            return steady
        lowest = check_result(self.outstanding[0], result, self.vocab_size, self.kv.pool.num_pages)
        plan = self.outstanding.popleft()
        self._step_done(plan)
        if result.failed_pages is not None and result.failed_pages.size:
            self._compute_again(result.failed_pages, plan.step_id)
        if lowest == BROKEN:
            self._fail_broken(plan, result)
        accepted = accept(plan, result, self.slots, self.kv, self.speculation, self.jump_ahead)
        if self._pools:
            accepted = take_pooled(plan, result, self.slots, accepted)
        self.prompt_tokens += accepted.prompt_tokens
        self.generation_tokens += accepted.generation_tokens
        for request in accepted.ended:
            self._end(request)
        self._readmit_drained()
        self._steady.accepted()
        return accepted.outputs + accepted.scores if accepted.scores else accepted.outputs

    def _step_done(self, plan: StepPlan) -> None:
        self.done_step = plan.step_id
        self.kv.step_done(plan.step_id)
        self.slots.step_done(plan.step_id)

    # -- states -------------------------------------------------------------------------------------------------------
    def _queue(self, request: Request) -> None:
        request.status = Status.WAITING
        self.policy.push_front(request)

    def _victim(self) -> Request:
        running = list(self.running.values())
        pages = self.kv.pages_held_alone(np.array([request.slot for request in running]))
        return cast(Request, self.policy.victim(running, pages.tolist()))

    def _preempt(self, request: Request) -> None:
        """Take a request's pages: the swap tier keeps what they hold, or it will be computed again. Tokens that steps
        under way return are kept."""
        swaps = self.swapping if self.swapping is not None and self.swapping.may(request) else None
        swapped = swaps is not None and swaps.swap_out(request, self.slots)
        self.preemptions.count(request.request_id, swapped, swap_full=swaps is not None and not swapped)
        self._drain(request)
        self._readmit_drained()

    def _drain(self, request: Request) -> None:
        slot = request.slot
        self._leave_running(request)
        self.slots.phase[slot], request.status = EMPTY, Status.DRAINING
        self.draining.append(request)

    def _compute_again(self, failed_pages: np.ndarray, step_id: int) -> None:
        """Pages that this step should have found filled hold nothing. What they spoilt is dropped, also what steps
        under way still return of it, and computed again from the tokens that are known."""
        self.kv.reset_prefix_cache()  # blocks computed from these pages may have been committed by now
        self._steady.end()
        found = spoilt(failed_pages, step_id, self.running.values(), self.draining, self.slots, self.kv)
        logger.warning("%d pages could not be loaded: %d requests are computed again", failed_pages.size, len(found))
        for request in found:
            self.slots.accepts[request.slot] = False
            if self.swapping is not None:
                self.swapping.distrust(request)
            if request.status is Status.RUNNING:
                self._drain(request)

    def _readmit_drained(self) -> None:
        """Queue the preempted requests that no step under way names any more: all their tokens are known."""
        s = self.slots
        for request in [r for r in self.draining if s.last_step[r.slot] <= self.done_step]:
            self.draining.remove(request)
            request.token_ids = s.tokens[request.slot, : s.known[request.slot]].copy()
            s.leave(request.slot, self.done_step)
            if self.swapping is None or not self.swapping.enqueue(request):
                self._queue(request)

    def _leave_running(self, request: Request) -> None:
        self._steady.end()
        s, slot = self.slots, request.slot
        filled = int(min(s.known[slot], s.computed[slot]))
        self.kv.free_slot(slot, int(s.last_step[slot]), filled, s.requests, s.tokens)
        del self.running[request.request_id]
        self.prefilling.pop(request.request_id, None)

    def _end(self, request: Request) -> None:
        """The request is over, whatever its state."""
        if request.status is Status.WAITING:
            self.policy.remove(request)
        elif request.status is Status.RUNNING:
            self._leave_running(request)
        elif request.status is Status.DRAINING:
            self.draining.remove(request)
        elif request.status is Status.COMPILING and self.constraints is not None:
            self.constraints.forget(request)
        if self.swapping is not None:
            self.swapping.ended(request)
        if request.slot >= 0:
            if self.jump_ahead is not None:
                self.jump_ahead.leave(request.slot, self.slots)
            self.slots.leave(request.slot, self.done_step)
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        if request.timeout is not None:
            self.deadlines.ended()
        for sibling in self.siblings.ended(request):
            self._queue(sibling)

    def _fail(self, request: Request, error: EngineError) -> None:
        self._notices.append(_error_output(request.request_id, error))
        self._end(request)

    def _fail_broken(self, plan: StepPlan, result: StepResult) -> None:
        """End the requests of rows whose logits were not numbers; what they drew before is dropped as surplus. Nothing
        of them stays in the prefix cache, nor what they found there, also where they have ended meanwhile."""
        rows = (result.tokens == BROKEN).reshape(plan.num_rows, -1).any(axis=1) & plan.samples
        for slot in plan.slot_of_row[rows].tolist():
            request = self.slots.owner(slot)
            self.kv.distrust(slot, request.sequence(self.slots.tokens[slot, : self.slots.known[slot]]))
            if self.slots.accepts[slot]:
                self._fail(request, broken_logits(request.request_id, request.num_tokens))

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, slots, pages and queue contradict each other."""
        check_integrity(self)


def _error_output(request_id: str, error: EngineError) -> CoreOutput:
    return CoreOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error.parts)
