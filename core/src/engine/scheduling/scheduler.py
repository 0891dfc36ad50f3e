"""The scheduler: which requests compute how many tokens in the next step.

One budget, no phases: a prompt's chunk, a prefix hit, a decode token and a resumed request are the same arithmetic on
the number of computed tokens. Decodes come first, then prompts under way, then new requests in the policy's order.

Plans are made ahead: a token that no result has brought yet is a placeholder, counted in `placed`. A request is never
planned beyond its known length; one that ends earlier (end of sequence) leaves a surplus token that is dropped.

A request with a constraint (structured outputs) is planned ahead as any other; the masks of its steps follow, see
`structured`.

With a drafter, a decode may compute drafts after its token. How many of them stay is known only when the result is
back, and until then that request is not planned again; the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.manager import KVManager
from engine.kv.reservation import Reservation
from engine.plugin.manifest import Blame
from engine.scheduling.admission import Admission, Prefills
from engine.scheduling.batch import Batch, build_plan
from engine.scheduling.decode import choose_decodes
from engine.scheduling.drafts import DraftSources, JumpForward, Speculation
from engine.scheduling.fast_path import DecodeFastPath
from engine.scheduling.gates import AdapterGate, Gate, Gates
from engine.scheduling.loading import Connector, Connectors
from engine.scheduling.preemption import Swapping
from engine.scheduling.results import check_result
from engine.scheduling.slots import Request, SlotTable
from engine.scheduling.states import States
from engine.scheduling.structured import Constraints
from engine.scheduling.update import accept
from engine.types.errors import EngineError
from engine.types.outputs import CoreOutput
from engine.types.plan import BROKEN, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.interfaces.scheduling_policy import SchedulingPolicy


class Scheduler:
    """Plans steps and takes their results in.

    Args:
        kv: the pages.
        policy: the waiting queue's order, and who is preempted.
        max_num_seqs: slots.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: most tokens of one request, prompt and output.
        speculation: how many drafts requests get; None where there is no drafter.
        long_prefill_token_threshold: most tokens of one prompt that a step computes; 0: no limit of its own.
        swapping: where preempted requests leave their pages; None: they are computed again.
        connectors: all of them, that of `swapping` too.
        constraints: those of requests with structured outputs; None where there is no grammar driver.
        gates: what else new requests wait for; adapters: the gate of those that have one.
        blame: names the driver that an error is about.
        jump_forward: over what constraints force; None: token by token.
        whole_prompts: a prompt is computed in one step; `max_num_batched_tokens` is at least `max_model_len` then.
        vocab_size: a result with another token ends the engine; None: not checked.
        now: the clock by which requests are timed and end: seconds that never go back.
        stages: of the pipeline of workers. With several, a request's token is planned when the one before it is known,
            which the plan brings to the first stage, and each plan has a part of those that decode.

    Attributes:
        states: where each unfinished request is; `add`, `abort`, `requests`, `running`, `prefilling` are its own.
        outstanding: plans that were made and whose results have not come back, oldest first.
        last_step: the last that was planned.
        prompt_tokens, generation_tokens: since start.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        policy: SchedulingPolicy[Request],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        speculation: Speculation | None = None,
        long_prefill_token_threshold: int = 0,
        swapping: Swapping | None = None,
        connectors: Sequence[Connector] = (),
        constraints: Constraints | None = None,
        gates: Sequence[Gate] = (),
        adapters: AdapterGate | None = None,
        blame: Blame | None = None,
        jump_forward: JumpForward | None = None,
        whole_prompts: bool = False,
        vocab_size: int | None = None,
        now: Callable[[], float] = time.monotonic,
        stages: int = 1,
    ) -> None:
        self.stages = stages
        self.kv = kv
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.swapping = swapping
        self.vocab_size = vocab_size
        self.slots = SlotTable(max_num_seqs, max_model_len, all_wait=stages > 1, now=now)
        self.drafts = DraftSources(speculation, jump_forward, constraints, early=stages > 1)
        self.fast_path = DecodeFastPath(self.slots, kv, vocab_size)
        self.connectors = Connectors(connectors, kv, self.slots)
        if self.connectors.stores:
            self.fast_path.computed = self.connectors.computed
        waits = Gates([*([] if constraints is None else [constraints]), *gates], adapters)
        blame = Blame(()) if blame is None else blame
        self.states = States(
            kv,
            policy,
            self.slots,
            self.fast_path,
            self.drafts,
            swapping,
            self.connectors,
            constraints,
            waits,
            blame,
            max_model_len,
        )
        self.add = self.states.add
        self.abort = self.states.abort
        self.requests = self.states.requests
        self.running = self.states.running
        self.prefilling = self.states.prefilling
        self.prefills = Prefills(self.states, long_prefill_token_threshold)
        self.admission = Admission(self.states, self.prefills, whole_prompts)
        self.outstanding: deque[StepPlan] = deque()
        self.last_step = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    # -- requests come and go -----------------------------------------------------------------------------------------
    def fail_all(self, error: EngineError) -> None:
        """End all requests with an error: the engine is dead, and pages and slots no longer matter."""
        self.states.fail_all(error)
        self.outstanding.clear()

    def take_notices(self) -> list[CoreOutput]:
        """Outputs of requests that ended between results, since the last call."""
        notices, self.states.notices = self.states.notices, []
        return notices

    @property
    def has_work(self) -> bool:
        """Something is unfinished, under way, or has to be told."""
        return bool(self.requests or self.outstanding or self.states.notices or self.connectors.busy)

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
        return self.states.preemptions.total

    # -- plan ---------------------------------------------------------------------------------------------------------
    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can be planned before a result comes back (or there is nothing)."""
        states = self.states
        if not (self.requests or self.connectors.busy):
            return None
        if states.deadlines:
            states.fail_late()
        states.take_ready()
        states.fail_faulty()
        waits = self.slots.num_free and (len(self.policy) or self.num_swapped)
        if self.fast_path.num_plans and not (waits or self.connectors.busy):
            self.last_step += 1
            self.outstanding.append(self.fast_path.next_plan(self.last_step))
            return self.outstanding[-1]
        while True:
            preempted = self.num_preemptions
            batch = self._choose()
            if not batch.empty:
                break
            if self.outstanding:
                return None
            # A pass that preempted everything it had chosen has made room: the next one sees it.
            if self.num_preemptions == preempted and not states.unblock():
                if (sections := self.connectors.sections(alone=True)) is None:
                    return None
                break  # a step of connectors alone
        self.last_step += 1
        plan = build_plan(self.last_step, batch, self.slots, self.connectors, self.swapping)
        if batch.empty:
            plan.sections = sections
        self.outstanding.append(plan)
        states.fail_faulty()
        if plan.num_rows and plan.num_decodes == len(self.running) and self._may_repeat(plan):
            self.fast_path.begin(plan)
        return plan

    def idle(self) -> StepPlan:
        """A step without rows: there is nothing to compute here, and elsewhere there is."""
        self.last_step += 1
        self.outstanding.append(self.fast_path.empty_plan(self.last_step))
        return self.outstanding[-1]

    def _choose(self) -> Batch:
        """The rows of the next step."""
        batch = Batch(self.max_num_batched_tokens, Reservation(self.kv))
        choose_decodes(batch, self.states, self.stages)
        if self.prefilling and not batch.left_out:
            self.prefills.choose(batch)
        if not batch.left_out and not self.states.draining and self.admission.resume(batch):
            self.admission.admit(batch)
        if self.prefills.threshold and batch.budget and not batch.left_out:
            self.prefills.choose(batch, again=True)  # what was kept for the queue, and not taken
        return batch

    def _may_repeat(self, plan: StepPlan) -> bool:
        """Whether nothing but tokens decides how the plan's rows, all that run, go on."""
        extras = self.drafts.speculation is not None or self.slots.num_waits
        return not (extras or plan.masks_follow or self.slots.num_matched or self.states.draining)

    # -- results ------------------------------------------------------------------------------------------------------
    def update(self, result: StepResult) -> list[CoreOutput]:
        """Take in the result of the oldest plan that is outstanding.

        Raises ContractError: it is another step's, or does not fit the plan.
        """
        if self.outstanding[0].idle_tokens and not (self.outstanding[0].num_rows or self.connectors.members):
            self._step_done(self.outstanding.popleft())
            return []
        if (outputs := self.fast_path.accept(self.outstanding[0], result)) is not None:
            self._step_done(self.outstanding.popleft())
            self.generation_tokens += len(outputs)
            return outputs
        states = self.states
        lowest = check_result(self.outstanding[0], result, self.vocab_size)
        plan = self.outstanding.popleft()
        self._step_done(plan)
        if self.drafts.speculation is not None:
            self.drafts.speculation.took(plan, result.num_drafts, self.slots.now())
        self._take_news(plan, result)
        self.drafts.take(plan, result)
        if lowest == BROKEN:
            states.fail_broken(plan, result)
        accepted = accept(plan, result, self.slots, self.kv, self.drafts, pools=states.pools)
        self.prompt_tokens += accepted.prompt_tokens
        self.generation_tokens += accepted.generation_tokens
        if self.connectors.stores and plan.num_rows:
            rows = plan.slot_of_row
            self.connectors.computed(rows, np.minimum(self.slots.known[rows] - 1, plan.num_computed + plan.num_tokens))
        for request in accepted.ended:
            transfer = states.end(request, well=True)
            if transfer is not None:
                ids = [output.request_id for output in accepted.outputs]
                accepted.outputs[ids.index(request.request_id)].kv_transfer = transfer
        states.readmit_drained()
        self.fast_path.accepted()
        return accepted.outputs + accepted.scores if accepted.scores else accepted.outputs

    def _take_news(self, plan: StepPlan, result: StepResult) -> None:
        self.connectors.expire()
        if result.news is not None and (failed := self.connectors.take(result)).size:
            self.states.compute_again(failed)
        for request in self.connectors.step_done(plan):
            if request.request_id not in self.prefilling:
                self.states.release_group(request)

    def _step_done(self, plan: StepPlan) -> None:
        self.states.done_step = plan.step_id
        self.kv.step_done(plan.step_id)
        self.slots.step_done(plan.step_id)

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, slots, pages and queue contradict each other."""
        self.states.check_integrity()
        if not self.requests and not self.outstanding:
            assert self.slots.num_free == self.slots.num_slots
            assert self.kv.pool.num_held == 0 or self.kv.pool.leases, "pages are held by nobody"
