"""Who watches an engine as a whole: what happened in an interval, and the hooks of its life (entry-point group
`engine_parts`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.plugin.loading import brought
from engine.types.hooks import OF_INTERVAL, EngineInfo, IntervalStats
from engine.types.outputs import StepStats

if TYPE_CHECKING:
    from engine.embedding import Launch
    from engine.plugin import HookRelay

INTERVAL = 10.0
"""Seconds between two calls of the hook `stats`, and between two lines of a log."""

NOTHING = StepStats()
"""What a core has done before its first step."""


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
        seconds = max(now - self._since, 1e-9)
        self._since = now
        self._before = stats
        if stats is None:
            return IntervalStats(seconds=seconds, num_waiting=self._llm.num_unfinished)
        found = msgspec.structs.asdict(stats)
        found |= {name: found[name] - getattr(before, name) for name in OF_INTERVAL}
        if not stats.num_running and not stats.num_waiting:  # those that the core has not told of yet wait for it
            found["num_waiting"] = self._llm.num_unfinished
        return IntervalStats(seconds=seconds, **found)


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
            worker = plan.start.worker
            info = EngineInfo(
                model=plan.model_name,
                architecture=plan.model.architecture,
                dtype=worker.dtype,
                device=worker.device,
                max_model_len=plan.max_model_len,
                max_num_seqs=worker.max_num_seqs,
                num_ranks=plan.config.data_parallel_size,
                drivers=tuple(tell(plan.selections)) if (tell := brought("chosen_drivers")) else (),
            )
            relay.engine_started(info=info)

    def stopping(self) -> None:
        """The engine is about to stop. Told once, where it had started."""
        started = self._started
        self._started = False
        self._interval = None
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
