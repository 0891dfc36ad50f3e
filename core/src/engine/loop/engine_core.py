"""The engine core: requests in, steps out to the executor, news back. One call of `step` after another drives it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from engine.interfaces.kv_connector import SwapUsage
from engine.loop.lockstep import agreed
from engine.plugin.hints import did_you_mean
from engine.plugin.manifest import Blame
from engine.scheduling.loading import POLL_SECONDS
from engine.scheduling.scheduler import Scheduler
from engine.types.errors import ConfigError, EngineDeadError
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.request import EngineRequest

if TYPE_CHECKING:
    from engine.interfaces.executor import Executor, StepFuture
    from engine.interfaces.lockstep import Lockstep
    from engine.plugin import HookRelay
    from engine.types.kv import PageMap
    from engine.types.plan import StepPlan
    from engine.types.start import Choice, WorkerReady

logger = logging.getLogger(__name__)

OF_WORKERS = "worker."
"""Before the name of a worker's method, which is then called on every rank."""
OF_STEPS = frozenset({"start", "execute", "sample", "drafts", "shutdown"})
"""The methods of workers that the executor calls in its own time, and nobody else."""

NO_SWAP = SwapUsage(0, 0)
GONE_SECONDS = 0.5
"""How long one whose step fails looks whether another core has left: workers may see that first."""
_SUSPECTS = ("executor", "platform", "model", "attention")
"""The points whose drivers are named where a step fails, whatever the error."""
WAIT_SECONDS = 0.005
"""How long a step that can do nothing for the requests that there are waits, at most, for what they wait for."""


class EngineCore:
    """One scheduler and one executor. Not thread-safe: all calls come from one thread.

    Args:
        scheduler: decides what steps compute.
        executor: started; computes them.
        worker_ready: what its workers answered.
        in_flight: most steps under way at once; with 1, a step is planned when the one before is done.
        hooks: the relay of the core's process.
        choices: the drivers at work, for the error where a step fails.
        drawing_rank: of the executor's, one that draws tokens.
        lockstep: with which other cores it steps; None: it steps by itself.

    Attributes:
        calls: what frontends may call, by name. Parts of the core add theirs: arguments and answers are plain data, or
            structs of it, and an EngineError is told to the caller.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        worker_ready: WorkerReady,
        in_flight: int = 2,
        hooks: HookRelay | None = None,
        choices: Sequence[Choice] = (),
        drawing_rank: int = 0,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.in_flight = in_flight
        self.worker_ready = worker_ready
        own = (self.stats, self.page_maps, self.reset_prefix_cache, self.check_integrity)
        self.calls: dict[str, Callable[..., Any]] = {function.__name__: function for function in own}
        self._hooks = hooks
        self._choices = choices
        self._drawing_rank = drawing_rank
        self.lockstep = lockstep
        self._checked_idle = True
        if hooks is not None and hooks.kv_events:
            scheduler.kv.record_events()
        self._futures: deque[StepFuture] = deque()
        self._unmasked: StepPlan | None = None  # the last step, where its masks have not been sent
        self._outputs: list[CoreOutput] = []
        self._num_tokens = 0
        self._dead: EngineDeadError | None = None

    # -- requests -----------------------------------------------------------------------------------------------------
    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises as `engine.scheduling.states.States.add`, and EngineDeadError where it has died."""
        if self._dead is not None:
            raise self._dead
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; each gets a last output with finish reason "abort". Unknown ids are ignored."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or (self.lockstep is not None and self.lockstep.awake)

    # -- the loop -----------------------------------------------------------------------------------------------------
    def step(self) -> CoreOutputs:
        """Take every finished result, plan the next step and send it; wait for the oldest step only where nothing can
        be planned or `in_flight` steps are under way. A step whose masks follow gets them as soon as the tokens before
        it are known, and before the next is planned.

        Returns what is new since the last call, perhaps nothing. Where the executor fails, every unfinished request
        ends here with an error, and the engine is dead.

        Raises EngineDeadError: the engine had died before this call.
        """
        if self._dead is not None and not self.scheduler.has_work:
            raise self._dead
        try:
            self._take_finished()
            while self._unmasked is not None:
                self._take_oldest()
            plan = self.scheduler.schedule()
            if self.lockstep is not None:
                plan = agreed(plan, self.scheduler, self.lockstep, bool(self._futures))
            if plan is not None:
                self._futures.append(self.executor.execute(plan))
                if plan.masks_follow:
                    self._unmasked = plan
                    self._send_masks()
            elif not self._futures and self.scheduler.has_work and not self.scheduler.states.notices:
                self.scheduler.states.gates.wait(POLL_SECONDS if self.scheduler.connectors.members else WAIT_SECONDS)
            if self._futures and (plan is None or len(self._futures) >= self.in_flight):
                self._take_oldest()
            self._take_finished()
        except Exception as error:
            self._die(error)
        self._checked_idle = False
        self._tell_kv_events()
        news = CoreOutputs(outputs=self._outputs + self.scheduler.take_notices(), stats=self.stats())
        self._outputs = []
        self._num_tokens = 0
        return news

    def _tell_kv_events(self) -> None:
        log = self.scheduler.kv.index.events
        if log is not None and (events := log.take()) and self._hooks is not None and self._hooks.kv_events:
            self._hooks.kv_events(events=events)

    def _take_finished(self) -> None:
        while self._futures and self._futures[0].done():
            self._take_oldest()

    def _take_oldest(self) -> None:
        """Wait for the oldest step under way and take its result in."""
        result = self._futures.popleft().result()
        plan = self.scheduler.outstanding[0]
        self._num_tokens += plan.total_tokens
        if plan.num_drafts is not None and result.num_drafts is not None:
            self._num_tokens -= int(plan.num_drafts.sum() - result.num_drafts.sum())  # the drafter found fewer
        self._outputs += self.scheduler.update(result)
        if self._unmasked is not None:
            self._send_masks()
        if self._hooks is not None and self._hooks.step_done:
            self._hooks.step_done(stats=self.stats())

    def _send_masks(self) -> None:
        """Let the last step draw, if all tokens that its masks depend on are known."""
        assert self._unmasked is not None and self.scheduler.states.constraints is not None
        drafts = partial(self._drafts, self._unmasked.step_id)
        masks = self.scheduler.states.constraints.masks(self._unmasked, self.scheduler.slots, drafts)
        if masks is not None:
            step_id = self._unmasked.step_id
            self._unmasked = None
            self.executor.sample(step_id, masks)

    def _drafts(self, step_id: int) -> list[list[int]]:
        """Those of the last step's rows. Every rank that draws has drafted them alike: one is asked."""
        (drafts,) = self.executor.call("drafts", step_id, rank=self._drawing_rank)
        return cast("list[list[int]]", drafts)

    def _die(self, error: Exception) -> None:
        suspects = dict.fromkeys(
            f"{point} {choice.driver}" for point in _SUSPECTS for choice in self._choices if choice.point == point
        )
        gone, until = None, time.monotonic() + GONE_SECONDS
        while self.lockstep is not None and (gone := self.lockstep.gone()) is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        logger.error("the engine core has died%s", "" if gone is None else f": {gone}", exc_info=error)
        self._dead = gone or EngineDeadError(
            "compute a step" + (f" with {', '.join(suspects)}" if suspects else ""),
            f"{type(error).__name__}: {Blame(self._choices).named(error)}",
            "start the engine again; requests in progress are lost",
        )
        self._dead.__cause__ = None if error is gone else error
        if self.lockstep is not None:
            self.lockstep.close()
        self._futures.clear()
        self._unmasked = None
        self.scheduler.fail_all(self._dead)

    # -- state --------------------------------------------------------------------------------------------------------
    def stats(self) -> StepStats:
        """Counts as of now."""
        scheduler = self.scheduler
        pool, retention, speculation = scheduler.kv.pool, scheduler.kv.index.retention, scheduler.drafts.speculation
        jump_forward, preemptions = scheduler.drafts.jump_forward, scheduler.states.preemptions
        jumps = None if jump_forward is None else jump_forward.learned
        swap = NO_SWAP if scheduler.swapping is None else scheduler.swapping.connector.half.usage()
        return StepStats(
            step_id=scheduler.states.done_step,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_tokens=self._num_tokens,
            pages_used=pool.num_held,
            pages_total=pool.num_usable,
            prefix_queries=scheduler.admission.prefix_queries,
            prefix_hits=scheduler.admission.prefix_hits,
            reused_tokens=scheduler.admission.reused_tokens,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
            num_drafts=0 if speculation is None else speculation.num_drafts,
            num_accepted_drafts=0 if speculation is None else speculation.num_accepted,
            num_draft_rows=0 if speculation is None else speculation.num_rows,
            accepted_drafts_at=() if speculation is None else tuple(speculation.accepted_at.tolist()),
            num_jump_tokens=0 if jumps is None else jumps.num_drafts,
            num_accepted_jump_tokens=0 if jumps is None else jumps.num_accepted,
            num_swapped=scheduler.num_swapped,
            num_swap_preemptions=preemptions.num_swapped,
            num_swap_full=preemptions.num_swap_full,
            swap_pages_used=swap.used,
            swap_pages_total=swap.total,
            kv_connectors=scheduler.connectors.counts(),
            retained_pages=() if retention is None else retention.by_priority(),
            retention_events=() if retention is None else tuple(retention.counts.items()),
            hook_failures=self._hooks.failures.told() if self._hooks is not None and self._hooks.failures else (),
        )

    def call(self, method: str, *args: Any) -> Any:
        """What a frontend asks by name: one of `calls`, or with "worker." before it a method of the workers, whose
        answers are a list, one a rank.

        Raises:
            ConfigError: there is no such function, or it is not for frontends.
            EngineError: the function's own.
        """
        if method in self.calls:
            return self.calls[method](*args)
        name = method.removeprefix(OF_WORKERS)
        if name == method or name in OF_STEPS or not name.isidentifier() or name.startswith("_"):
            remedy = did_you_mean(method, self.calls) or f"the calls are: {', '.join(self.calls)}, worker.METHOD"
            raise ConfigError(f"call {method!r}", f"the core has no call {method!r}", remedy)
        return self.executor.call(name, *args)

    def page_maps(self) -> list[PageMap]:
        """Who holds the pages of each core's KV cache now, for monitors: of one core, one."""
        return [self.scheduler.kv.pool.page_map()]

    def check_health(self) -> None:
        """Ask the executor whether its workers live: between steps nobody else does.

        Raises EngineDeadError: the engine has died, perhaps found out here; every unfinished request ends with it.
        """
        if self._dead is None:
            try:
                return self.executor.check_health()
            except Exception as error:
                self._die(error)
        assert self._dead is not None
        raise self._dead

    def check_idle(self) -> None:
        """Once after each time that there was work: see that nothing was lost, now that nobody waits for an answer. It
        takes some milliseconds for each 10,000 pages.

        Raises EngineDeadError: the inner state contradicts itself; what is computed from now on could be wrong.
        """
        if self._checked_idle or self._dead is not None or self.scheduler.has_work:
            return
        try:
            self.check_integrity()
        except AssertionError as error:
            self._die(error)
            assert self._dead is not None
            raise self._dead from error
        self._checked_idle = True

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Requests under way go on with their own pages and commit nothing more."""
        self.scheduler.kv.reset_prefix_cache()
        self._tell_kv_events()

    def check_integrity(self) -> None:
        """Raise AssertionError where the inner state contradicts itself. For tests and idle moments."""
        self.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Stop the executor. Idempotent."""
        self._futures.clear()
        if self.lockstep is not None:
            self.lockstep.close()  # first: whatever the rest takes, the others are told
        self.scheduler.states.gates.shutdown()
        self.scheduler.connectors.close()
        self.executor.shutdown()
