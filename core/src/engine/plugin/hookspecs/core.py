"""The hooks of the process that schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plugin.hookspecs.markers import observing

if TYPE_CHECKING:
    from engine.types.kv import KVEvent
    from engine.types.outputs import StepStats


class CoreHooks:
    """Hooks of the process that schedules."""

    @observing
    def step_done(self, stats: StepStats) -> None:
        """The results of one step have been taken in: tokens accepted, requests ended, pages returned.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            stats: counts of this step and since the start. A fresh object each time: it may be kept.
        Process: engine core.
        Thread: the step loop's. Its time is added to each step (the loop's own is under 0.5 ms): hand work to a
            thread of your own.
        Cost: once a step. Nothing at all where nobody listens.
        """

    @observing
    def kv_events(self, events: list[KVEvent]) -> None:
        """What happened to the prefix cache in one step: blocks stored, blocks removed, everything cleared, in order.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            events: at least one, see `engine.types.kv`. Plain data, which may be kept, or sent elsewhere with
                msgspec.
        Process: engine core.
        Thread: the step loop's. Its time is added to each step: hand work to a thread of your own.
        Cost: at most once a step, and a few microseconds for each block while somebody listens. Nothing at all where
            nobody does.
        """
