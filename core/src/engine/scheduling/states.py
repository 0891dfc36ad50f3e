"""Where each unfinished request is, and how it gets from one place to the next.

A new request that can be served waits (at gates, for another of its group, in the policy's queue), then runs in a
slot. Where pages are short one is preempted: it drains until no step under way names it, and waits again, in the
policy's queue or in the swap tier's. It may end anywhere. Admission, which gives slots, is in
`engine.scheduling.admission`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.kv.hashing import root_hash
from engine.kv.manager import KVManager
from engine.plugin.manifest import Blame
from engine.scheduling.drafts import DraftSources
from engine.scheduling.fast_path import DecodeFastPath
from engine.scheduling.gates import Gates
from engine.scheduling.loading import Connectors
from engine.scheduling.preemption import Preemptions, Swapping
from engine.scheduling.results import broken_logits
from engine.scheduling.slots import EMPTY, Request, SlotTable, Status
from engine.scheduling.structured import Constraints
from engine.types.errors import (
    ContractError,
    EngineError,
    InvalidRequestError,
    KVCacheTooSmallError,
    PromptTooLongError,
    RequestTimeoutError,
    rebuild_error,
)
from engine.types.outputs import CoreOutput
from engine.types.plan import BROKEN, StepPlan, StepResult
from engine.types.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from engine.interfaces.scheduling_policy import SchedulingPolicy

logger = logging.getLogger(__name__)


class States:
    """All unfinished requests.

    Args: as in `engine.scheduling.scheduler.Scheduler`, and
        slots: of all running requests.
        fast_path: is told when somebody leaves a slot.
        drafts: is told when a request ends.
        gates: what new requests wait for, constraints among them.

    Attributes:
        requests: all of them, by id.
        running: requests in slots, in order of admission.
        prefilling: those of them that still have known tokens to compute.
        draining: preempted requests named by a step under way.
        groups: of parallel sampling.
        deadlines: of the requests that have one.
        notices: outputs of requests that ended between results.
        pools: some request has pooled, or will.
        done_step: the last step whose result was taken in.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: SchedulingPolicy[Request],
        slots: SlotTable,
        fast_path: DecodeFastPath,
        drafts: DraftSources,
        swapping: Swapping | None,
        connectors: Connectors,
        constraints: Constraints | None,
        gates: Gates,
        blame: Blame,
        max_model_len: int,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.slots = slots
        self.fast_path = fast_path
        self.drafts = drafts
        self.swapping = swapping
        self.connectors = connectors
        self.constraints = constraints
        self.gates = gates
        self.preemptions = Preemptions()
        self.blame = blame
        self.max_model_len = max_model_len
        self.pools = False
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.draining: list[Request] = []
        self.groups = ParallelSampling()
        self.deadlines = Deadlines(slots.now)
        self.notices: list[CoreOutput] = []
        self.done_step = 0

    # -- waiting ------------------------------------------------------------------------------------------------------
    def add(self, request: EngineRequest) -> None:
        """Queue a request. One whose prompt can never fit the KV cache ends at once, with an error in the outputs.

        Raises:
            InvalidRequestError: its id is in use, or it has no tokens.
            PromptTooLongError: no token could be generated within `max_model_len`; one that pools needs room for none.
        """
        self._check(request)
        n, pools = len(request.prompt_token_ids), request.pooling is not None
        self.pools = self.pools or pools
        most = 0 if pools else request.params.max_tokens
        limit = self.max_model_len if most is None else min(n + most, self.max_model_len)
        beside = request.encoder or request.embeds
        adapter = None if request.adapter is None else request.adapter.identity
        root = root_hash(request.cache_salt, adapter, self.kv.digest, None if beside is None else beside.key)
        new = Request(request, self.slots, limit, root)
        self.connectors.added(new.request_id)
        self.requests[new.request_id] = new
        if new.timeout is not None:
            self.deadlines.add(new, new.timeout)
        if not self.kv.fits_at_all(n):
            self.fail_too_small(new)
        elif self.gates.begin(new):
            new.status = Status.PENDING
        else:
            self._enter_queue(new)

    def _check(self, request: EngineRequest) -> None:
        asked = f"add request {request.request_id!r}"
        n, pools = len(request.prompt_token_ids), request.pooling is not None
        if request.request_id in self.requests:
            raise InvalidRequestError(asked, "an unfinished request has this id", "use another id")
        if n < 1:
            raise InvalidRequestError(asked, "its prompt has no tokens")
        if n + (not pools) > self.max_model_len:
            more = "" if pools else "with at least one token to generate "
            raise PromptTooLongError(
                f"a prompt of {n} tokens", f"{more}it exceeds max_model_len={self.max_model_len}", "shorten the prompt"
            )
        if request.params.structured_outputs is not None and self.constraints is None:
            asked += " with structured_outputs"
            raise InvalidRequestError(asked, "this engine has no grammar driver", "start it with --grammar DRIVER")
        if request.adapter is not None and not self.gates.adapt:
            asked, remedy = (
                f"{asked} with adapter {request.adapter.name!r}",
                "start it with --adapter DRIVER",
            )
            raise InvalidRequestError(asked, "this engine has no driver for adapters", remedy)
        if self.kv.index.retention is None and not all(wish.hint for wish in request.kv_retention):
            asked, remedy = "kv_retention", "leave it out, or send it to an engine whose evictor retains: lru, prefix"
            raise InvalidRequestError(asked, f"this engine retains nothing: {self.kv.index.retains_not}", remedy)

    def _enter_queue(self, request: Request) -> None:
        """A new request that has all it needs waits for a slot, or for another of its group."""
        request.status = Status.HELD
        if not self.kv.enable_prefix_caching or self.groups.join(request):
            self._queue(request, self.policy.push)

    def requeue(self, request: Request) -> None:
        """A request waits for a slot, before those that came after it."""
        self._queue(request, self.policy.push_front)

    def _queue(self, request: Request, push: Callable[[Request], None], status: Status = Status.WAITING) -> None:
        request.status = Status.HELD  # no queue has it, should this one raise
        try:
            push(request)
        except Exception as error:
            logger.exception("request %s could not be queued", request.request_id)
            asked, found = f"queue request {request.request_id!r}", f"it raised {type(error).__name__}: {error}"
            remedy = "name another driver, or report it to this one's author; the log has the traceback"
            return self.fail(request, ContractError(asked, found, remedy, point="scheduling_policy"))
        request.status = status

    def take_ready(self) -> None:
        """Queue the requests that no longer wait at a gate."""
        for request, error in self.gates.ready():
            if error is None:
                self._enter_queue(request)
            else:
                self.fail(request, error)
        for request in reversed(self.connectors.ready()):
            self.requeue(request)

    def prompt_done(self, request: Request) -> None:
        """A plan computes the last of a request's known tokens; others of its group may find them in the cache."""
        del self.prefilling[request.request_id]
        if request not in self.connectors.arriving:
            self.release_group(request)

    def release_group(self, request: Request) -> None:
        """What others of the request's group wait for is in the cache."""
        for held in reversed(self.groups.prompt_done(request)):
            self.requeue(held)

    # -- preempted ----------------------------------------------------------------------------------------------------
    def preempt_one(self) -> None:
        """Preempt the running request that the policy names."""
        running = list(self.running.values())
        pages = self.kv.pages_held_alone(np.array([request.slot for request in running]))
        self.preempt(self.policy.victim(running, pages.tolist()))

    def preempt(self, request: Request) -> None:
        """Take a request's pages: the swap tier keeps what they hold, or it will be computed again. Tokens that steps
        under way return are kept."""
        swaps = self.swapping if self.swapping is not None and self.swapping.may(request) else None
        swapped = None if swaps is None else swaps.swap_out(request, self.slots)
        self.preemptions.count(request.request_id, bool(swapped), swap_full=swapped is False)
        self._drain(request)
        self.readmit_drained()

    def _drain(self, request: Request) -> None:
        self._leave_running(request)
        self.slots.phase[request.slot] = EMPTY
        request.status = Status.DRAINING
        self.draining.append(request)

    def readmit_drained(self) -> None:
        """Queue the preempted requests that no step under way names any more: all their tokens are known."""
        s = self.slots
        for request in [r for r in self.draining if s.last_step[r.slot] <= self.done_step]:
            self.draining.remove(request)
            request.token_ids = s.tokens[request.slot, : s.known[request.slot]].copy()
            s.leave(request.slot, self.done_step)
            if self.swapping is not None and self.swapping.keeps(request):
                self._queue(request, self.swapping.queue.push_front, Status.SWAPPED)
            else:
                self.requeue(request)

    def unblock(self) -> bool:
        """Nothing can be planned and nothing is under way: make room. False where there is nobody to make room for, or
        where pages that are lent will come back."""
        if self.connectors.let_go() or (self.kv.reuses is not None and self.kv.reuses.let_go(self.done_step)):
            return True
        if len(self.running) > 1:
            self.preempt_one()
            return True
        if self.kv.pool.leases:
            return False
        stuck = next(iter(self.running.values()), None)
        if stuck is None and self.swapping is not None:
            stuck = self.swapping.queue.peek()
        if stuck is None:
            stuck = self.policy.peek()
        if stuck is not None:
            self.fail_too_small(stuck)
        return stuck is not None

    def compute_again(self, failed: np.ndarray) -> None:
        """Pages, int32 [n], do not hold what they should. Nobody finds them any more, nor what chains on them; the
        requests that have them drop what steps under way still return, and are computed again from the tokens that are
        known."""
        self.fast_path.end()
        found = dict.fromkeys(self.connectors.spoilt(failed))
        found.update(dict.fromkeys(map(self.slots.owner, self.kv.forget(failed))))
        logger.warning("%d pages could not be loaded: %d requests are computed again", failed.size, len(found))
        for request in found:
            self.slots.accepts[request.slot] = False
            self.kv.blocks.end(request.slot)
            self.connectors.refuse(request)
            if self.swapping is not None:
                self.swapping.distrust(request)
            if request.status is Status.RUNNING:
                self._drain(request)

    # -- ended --------------------------------------------------------------------------------------------------------
    def end(self, request: Request, well: bool = False) -> dict[str, Any] | None:
        """The request is over, whatever its state. Returns `CoreOutput.kv_transfer`.

        well: it has all its tokens.
        """
        transfer = self.connectors.ended(request, well)
        if request.status is Status.WAITING:
            self.policy.remove(request)
        elif request.status is Status.RUNNING:
            self._leave_running(request)
        elif request.status is Status.DRAINING:
            self.draining.remove(request)
        elif request.status is Status.PENDING:
            self.gates.forget(request)
        self.gates.ended(request)
        if self.swapping is not None:
            self.swapping.ended(request)
        if request.slot >= 0:
            self.drafts.leave(request.slot, self.slots)
            self.slots.leave(request.slot, self.done_step)
        if request.kv_retention and self.kv.index.retention is not None:
            self.kv.index.retention.ended(request.cache_salt, request.hashes, request.kv_retention)
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        if request.timeout is not None:
            self.deadlines.ended()
        for leader in self.groups.ended(request):
            self.requeue(leader)
        return transfer

    def _leave_running(self, request: Request) -> None:
        self.fast_path.end()
        s, slot = self.slots, request.slot
        filled = int(min(s.known[slot], s.computed[slot]))
        self.kv.free_slot(slot, int(s.last_step[slot]), filled, s.requests, s.tokens)
        del self.running[request.request_id]
        self.prefilling.pop(request.request_id, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; ids that are not (or no longer) known are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.notices.append(CoreOutput(request_id=request_id, finish_reason=FinishReason.ABORT))
                self.end(request)

    def fail(self, request: Request, error: EngineError) -> None:
        """End a request with an error."""
        self.notices.append(_error_output(request.request_id, self.blame.named(error)))
        self.end(request)

    def fail_broken(self, plan: StepPlan, result: StepResult) -> None:
        """End the requests of rows that could not draw; what they drew before is dropped as surplus. Where logits were
        not numbers, nothing of them stays in the prefix cache, nor what they found there, also where they have ended
        meanwhile."""
        broken = (result.tokens == BROKEN).reshape(plan.num_rows, -1).any(axis=1) & plan.samples
        for row in np.flatnonzero(broken).tolist():
            slot = int(plan.slot_of_row[row])
            request, parts = self.slots.owner(slot), (result.errors or {}).get(row)
            if parts is not None and [type(part) for part in parts] != [str] * 4:
                asked, found = f"the error of row {row} of step {plan.step_id}", f"the worker returned {parts!r:.200}"
                raise ContractError(asked, found, "tell the author of the platform's worker", point="platform")
            if parts is None:
                self.kv.distrust(slot, request.sequence(self.slots.tokens[slot, : self.slots.known[slot]]))
            if self.slots.accepts[slot]:
                error = rebuild_error(parts) if parts else broken_logits(request.request_id, request.num_tokens)
                self.fail(request, error)

    def fail_faulty(self) -> None:
        """End the requests over which a connector raised an error. What should have been loaded for one that runs is
        not there: nothing of it stays in the prefix cache."""
        for request, error in self.connectors.take_faults():
            if request.status is Status.RUNNING:
                known = int(self.slots.known[request.slot])
                self.kv.distrust(request.slot, request.sequence(self.slots.tokens[request.slot, :known]))
            if request.status is not Status.FINISHED:
                self.fail(request, error)

    def fail_too_small(self, request: Request) -> None:
        """End a request that the KV cache could not hold if it were alone."""
        n, usable = request.num_tokens, self.kv.pool.num_usable
        pages = max(self.kv.pages_at_least(n), usable + 1)
        error = KVCacheTooSmallError(
            f"compute request {request.request_id!r} of {n} tokens",
            f"it needs at least {pages} KV pages, the cache has {usable}",
            "raise --kv-cache-memory or --num-kv-pages, or send a shorter prompt or a smaller max_tokens",
        )
        self.fail(request, error)

    def fail_late(self) -> None:
        """End the requests whose deadline has passed."""
        for request in self.deadlines.late():
            done = max(0, request.num_tokens - request.num_prompt_tokens)
            error = RequestTimeoutError(
                f"finish request {request.request_id!r} in {request.timeout:g} s",
                f"after that time {done} of its output tokens were there",
                "give it more time, or ask for fewer tokens; where it waited, the engine has more work than it can do",
            )
            self.fail(request, error)

    def fail_all(self, error: EngineError) -> None:
        """End all requests with an error: the engine is dead, and pages and slots no longer matter."""
        self.notices += [_error_output(request_id, error) for request_id in self.requests]
        for of_state in (self.requests, self.running, self.prefilling, self.draining):
            of_state.clear()
        self.deadlines.clear()
        if self.swapping is not None:
            self.swapping.clear()
        self.connectors.clear()
        self.gates.shutdown()

    # -- integrity ----------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raise AssertionError where requests, slots, pages and queues contradict each other."""
        self.slots.check_integrity()
        self.kv.check_integrity()
        by_status: dict[Status, int] = dict.fromkeys(Status, 0)
        for request in self.requests.values():
            by_status[request.status] += 1
            assert (request.slot >= 0) == (request.status in (Status.RUNNING, Status.DRAINING)), request
        assert by_status[Status.RUNNING] == len(self.running)
        assert by_status[Status.DRAINING] == len(self.draining)
        assert by_status[Status.WAITING] == len(self.policy)
        assert by_status[Status.HELD] == len(self.groups)
        assert by_status[Status.SWAPPED] == (0 if self.swapping is None else len(self.swapping))
        if self.swapping is not None:
            self.swapping.check_integrity(idle=not self.requests)
        assert by_status[Status.PENDING] == len(self.gates)
        assert by_status[Status.LOADING] == len(self.connectors.waiting)
        self.connectors.check_integrity()
        assert self.prefilling.keys() <= self.running.keys()
        for request in self.running.values():
            end = int(self.slots.computed[request.slot] + self.slots.drafts[request.slot])
            self.kv.check_slot(request.slot, end)


def _error_output(request_id: str, error: EngineError) -> CoreOutput:
    return CoreOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error.parts)


class ParallelSampling:
    """The requests of one prompt (n > 1) are a group: one of them leads and computes the prompt, the others are held
    and find its pages in the cache.

    They are queued when the plan that ends the prompt is made, and may enter that very plan: they share its whole
    blocks and compute the few tokens after them. Waiting for the next plan, in which the page with these tokens could
    be copied, saved as much as the further step cost (the bundled model, n from 4 to 16), so nobody waits.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Request]] = {}  # by parent, those whose prompt nobody has computed: one leads

    def __len__(self) -> int:
        """Requests that are held."""
        return sum(len(group) - 1 for group in self._groups.values())

    def join(self, request: Request) -> bool:
        """True where the request may be queued: it leads, or nobody of its group waits. False: it is held."""
        if request.parent is None:
            return True
        group = self._groups.setdefault(request.parent, {})
        group[request.request_id] = request
        return len(group) == 1

    def _led_by(self, request: Request) -> dict[str, Request]:
        """The group that the request leads, as the first of those left; an empty one where it leads none."""
        group = self._groups.get(request.parent or "", {})
        return group if next(iter(group), None) == request.request_id else {}

    def prompt_done(self, request: Request) -> list[Request]:
        """The request's prompt is in the cache: if it led, those that may be queued now, in their order."""
        if group := self._led_by(request):
            del self._groups[request.parent or ""]
        return list(group.values())[1:]

    def ended(self, request: Request) -> list[Request]:
        """The request ended: if it led, who leads from now on (none or one), to be queued."""
        led, group = self._led_by(request), self._groups.get(request.parent or "", {})
        group.pop(request.request_id, None)
        if not group:
            self._groups.pop(request.parent or "", None)
        return [next(iter(led.values()))] if led else []


class Deadlines:
    """Which requests have run out of time; costs nothing while no request has a deadline. A heap, whose entries die
    with their requests; dead ones are swept out when they are the greater part.

    Args:
        clock: seconds that only grow, so that setting the machine's time forward or back ends nobody.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0
        self._alive = 0

    def __len__(self) -> int:
        """Unfinished requests with a deadline."""
        return self._alive

    def add(self, request: Request, timeout: float) -> None:
        """The request has to end in so many seconds."""
        self._count += 1
        self._alive += 1
        heappush(self._heap, (self.clock() + timeout, self._count, request))

    def ended(self) -> None:
        """A request with a deadline is FINISHED."""
        self._alive -= 1
        if not self._alive:
            self._heap.clear()
        elif len(self._heap) > 2 * self._alive + 64:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapify(self._heap)

    def late(self) -> list[Request]:
        """Unfinished requests whose deadline has passed; the caller ends them."""
        late, now = [], self.clock()
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.status is not Status.FINISHED:
                late.append(request)
        return late

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
        self._alive = 0
