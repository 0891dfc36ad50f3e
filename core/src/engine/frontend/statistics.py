"""Who watches an engine from within this process: single requests, intervals, and the hooks of its own life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from engine.plugin.selection import chosen_drivers
from engine.types.hooks import EngineInfo, IntervalStats, RequestSummary
from engine.types.outputs import CoreOutput, StepStats

if TYPE_CHECKING:
    from engine.frontend.launch import Launch
    from engine.frontend.request_state import RequestState, SequenceState
    from engine.plugin import HookRelay
    from engine.types.errors import EngineError

INTERVAL = 10.0
"""Seconds between two calls of the hook `stats`, and between two lines of a log."""

NOTHING = StepStats(
    step_id=0,
    num_running=0,
    num_waiting=0,
    num_tokens=0,
    pages_used=0,
    pages_total=0,
    prefix_queries=0,
    prefix_hits=0,
    num_preemptions=0,
)
"""What a core has done before its first step."""


class RequestObserver(Protocol):
    """Counts what becomes of requests; called by one thread. A sequence is one of a request's n."""

    def arrived(self, request: RequestState) -> None:
        """A request is about to be sent."""

    def stepped(self, stats: StepStats | None) -> None:
        """News of one step came; None where the core told nothing of itself."""

    def first_token(self, seconds: float) -> None:
        """A sequence's first token came, so long after its request arrived, tokenising included."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came, each so long after the one before it in its sequence."""

    def ended(self, request: RequestState, sequence: SequenceState, reason: str, now: float) -> None:
        """A sequence ended. `now`: by the monotonic clock."""

    def retried(self) -> None:
        """A request is sent again, because its engine core has died."""


def follow(
    news: Iterable[CoreOutput],
    sequences: Mapping[str, tuple[RequestState, SequenceState]],
    now: float,
    observer: RequestObserver | None,
) -> None:
    """Enter into the sequences when their tokens came.

    Args:
        news: of one step, or of several that are taken in at once.
        sequences: the unfinished ones, by the core's id.
        now: by the monotonic clock.
        observer: is told what passed between tokens.
    """
    single: dict[float, int] = {}  # sequences that were in the same step before waited equally long
    for output in news:
        entry = sequences.get(output.request_id)
        if entry is None or not (count := len(output.new_token_ids)):
            continue
        request, sequence = entry
        if not sequence.num_tokens:
            sequence.first_token = now
            sequence.queue_time = output.queue_time
            sequence.prefill_time = output.prefill_time
            if observer is not None and not sequence.retried:
                observer.first_token(now - request.arrived)
        elif count == 1:
            last = sequence.last_token
            single[last] = single.get(last, 0) + 1
        elif observer is not None:
            observer.next_tokens((now - sequence.last_token) / count, count)
        sequence.last_token = now
        sequence.num_tokens += count
    if observer is not None:
        for last, count in single.items():
            observer.next_tokens(now - last, count)


def summary_of(
    request: RequestState, sequence: SequenceState, model: str, reason: str, error: EngineError | None
) -> RequestSummary:
    """What the hook `request_finished` is told of a sequence that ended.

    Args:
        model: the model's name in the API.
        reason: why it ended.
        error: its own or that of its request, where there is one.
    """
    started = sequence.num_tokens > 0
    info = request.info
    return RequestSummary(
        request_id=request.request_id,
        index=sequence.output.index,
        model=model,
        arrival_time=request.requests[0].arrival_time,
        queue_seconds=sequence.queue_time if started else None,
        prefill_seconds=sequence.prefill_time if started else None,
        first_token_seconds=sequence.first_token - request.arrived if started else None,
        decode_seconds=sequence.last_token - sequence.first_token,
        total_seconds=time.monotonic() - request.arrived,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=sequence.num_cached_tokens,
        output_tokens=len(sequence.output.token_ids),
        finish_reason=reason,
        error_code=error.code if error is not None and reason == "error" else "",
        http=None if info is None else info.http,
    )


class Observed(Protocol):
    """What is watched: `AsyncLLM`, or what looks like it."""

    @property
    def last_stats(self) -> StepStats | None: ...

    @property
    def num_unfinished(self) -> int: ...


class Interval:
    """Looks again and again, and says what happened in between.

    Args:
        llm: the engine that is watched.
        clock: seconds that only grow.
    """

    def __init__(self, llm: Observed, clock: Callable[[], float] = time.monotonic) -> None:
        self._llm = llm
        self._clock = clock
        self._since = clock()
        self._before = llm.last_stats

    def look(self) -> IntervalStats:
        """What happened since the last call, or since this object was made."""
        now, stats, before = self._clock(), self._llm.last_stats, self._before or NOTHING
        seconds, self._since, self._before = max(now - self._since, 1e-9), now, stats
        unfinished = self._llm.num_unfinished
        if stats is None:
            return IntervalStats(seconds=seconds, num_running=0, num_waiting=unfinished)
        return IntervalStats(
            seconds=seconds,
            num_running=stats.num_running,
            # Requests that the core has not told of yet are waiting for it.
            num_waiting=stats.num_waiting if stats.num_running or stats.num_waiting else unfinished,
            prompt_tokens=stats.prompt_tokens - before.prompt_tokens,
            generation_tokens=stats.generation_tokens - before.generation_tokens,
            prefix_queries=stats.prefix_queries - before.prefix_queries,
            prefix_hits=stats.prefix_hits - before.prefix_hits,
            num_drafts=stats.num_drafts - before.num_drafts,
            num_accepted_drafts=stats.num_accepted_drafts - before.num_accepted_drafts,
            pages_used=stats.pages_used,
            pages_total=stats.pages_total,
            num_preemptions=stats.num_preemptions,
            num_swap_preemptions=stats.num_swap_preemptions,
            num_swapped=stats.num_swapped,
            swap_pages_used=stats.swap_pages_used,
            swap_pages_total=stats.swap_pages_total,
        )


class LifecycleHooks:
    """The hooks of an engine's own life: it has started, it is about to stop, how it does meanwhile. Tells each once.

    Args:
        relay: the frontend's; None: nobody listens.
        engine: the engine that is watched.
        clock: seconds that only grow.
        tells_stats: of several processes that could tell the same, one does.
    """

    def __init__(
        self,
        relay: HookRelay | None,
        engine: Observed,
        clock: Callable[[], float] = time.monotonic,
        tells_stats: bool = True,
    ) -> None:
        self._relay = relay
        self._engine = engine
        self._clock = clock
        self._tells_stats = tells_stats
        self._started = False
        self._interval: Interval | None = None
        self._due = 0.0

    def started(self, plan: Launch | None) -> None:
        """The engine stands; `plan` is what the launcher decided, None in tests that have none."""
        self._started = True
        relay = self._relay
        if relay is None:
            return
        if relay.stats and self._tells_stats:
            self._interval = Interval(self._engine, self._clock)
            self._due = self._clock() + INTERVAL
        if relay.engine_started and plan is not None:
            relay.engine_started(info=engine_info(plan))

    def stopping(self) -> None:
        """The engine is about to stop. Told once, where it had started."""
        started, self._started, self._interval = self._started, False, None
        if started and self._relay is not None and self._relay.engine_stopping:
            self._relay.engine_stopping()

    @property
    def hears_stats(self) -> bool:
        """Whether `look` may have anything to tell."""
        return self._interval is not None

    def look(self) -> None:
        """Tell how the engine did, where an interval has passed."""
        interval = self._interval
        if interval is None or self._relay is None or (now := self._clock()) < self._due:
            return
        self._due = now + INTERVAL
        heard = self._relay.stats
        if heard is None:
            self._interval = None
        else:
            heard(stats=interval.look())

    async def run(self) -> None:
        """Look each interval, until nobody listens any more or the task is cancelled."""
        while self._interval is not None:
            await asyncio.sleep(max(0.0, self._due - self._clock()))
            self.look()


def engine_info(plan: Launch) -> EngineInfo:
    """What hooks are told of an engine."""
    worker = plan.start.worker
    return EngineInfo(
        model=plan.model_name,
        architecture=plan.model.architecture,
        dtype=worker.dtype,
        device=worker.device,
        max_model_len=plan.max_model_len,
        max_num_seqs=worker.max_num_seqs,
        num_ranks=plan.config.data_parallel_size,
        drivers=tuple(chosen_drivers(plan.selections)),
    )
