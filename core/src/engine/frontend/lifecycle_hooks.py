"""The hooks of an engine's own life: it has started, it is about to stop, how it does meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.frontend import statistics
from engine.frontend.statistics import Observed
from engine.plugin.explain import chosen_drivers
from engine.types.hooks import EngineInfo

if TYPE_CHECKING:
    from engine.frontend.launch import Launch
    from engine.plugin import HookRelay


class LifecycleHooks:
    """Tells each of them once.

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
        self._relay, self._engine, self._clock = relay, engine, clock
        self._tells_stats = tells_stats
        self._started = False
        self._interval: statistics.Interval | None = None
        self._due = 0.0

    def started(self, plan: Launch | None) -> None:
        """The engine stands; `plan` is what the launcher decided, None in tests that have none."""
        self._started = True
        relay = self._relay
        if relay is None:
            return
        if relay.stats and self._tells_stats:
            self._interval = statistics.Interval(self._engine, self._clock)
            self._due = self._clock() + statistics.INTERVAL
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
        self._due = now + statistics.INTERVAL
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
