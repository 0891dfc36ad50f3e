"""The hooks: lifecycle calls that any number of plugins may listen to.

A hook plugin registers in the entry-point group of the process in which it runs, `engine.hooks.frontend.v0`,
`engine.hooks.core.v0` or `engine.hooks.worker.v0`, and marks its functions:

    from engine.plugin import hookimpl

    @hookimpl
    def step_done(stats):
        print(stats.num_running)

An implementation may take fewer arguments than the hook has, so that a hook can grow without breaking anybody.
Arguments are passed by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from engine.types.kv_events import KVEvent
    from engine.types.outputs import StepStats
    from engine.types.request import EngineRequest
    from engine.types.start import WorkerReady

hookspec = pluggy.HookspecMarker("engine")
hookimpl = pluggy.HookimplMarker("engine")
"""Marks a function as the implementation of the hook of its name (`tryfirst=True`, `trylast=True` order it)."""


class FrontendHooks:
    """Hooks of the process that tokenises and answers."""

    @hookspec
    def request_received(self, request: EngineRequest) -> None:
        """A request has been validated and tokenised and is about to be sent to the engine core.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            request: the request as it will travel. Read it, do not change it.
        Process: frontend.
        Thread: the one that takes requests (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once a request. Nothing at all where nobody listens.
        """


class CoreHooks:
    """Hooks of the process that schedules."""

    @hookspec
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

    @hookspec
    def kv_events(self, events: list[KVEvent]) -> None:
        """What happened to the prefix cache in one step: blocks stored, blocks removed, everything cleared, in order.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            events: at least one, see `engine.types.kv_events`. Plain data, which may be kept, or sent elsewhere with
                msgspec.
        Process: engine core.
        Thread: the step loop's. Its time is added to each step: hand work to a thread of your own.
        Cost: at most once a step, and a few microseconds for each block while somebody listens. Nothing at all where
            nobody does.
        """


class WorkerHooks:
    """Hooks of the processes that compute."""

    @hookspec
    def worker_started(self, info: WorkerReady) -> None:
        """A worker has loaded its weights and allocated its KV cache, and is about to report that it is ready.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            info: what the worker answers its start with: pages, bytes, parameters, seconds.
        Process: worker, on each rank.
        Thread: the worker's main thread.
        Cost: once a start; it delays the start.
        """


HOOKSPECS: dict[str, type] = {"frontend": FrontendHooks, "core": CoreHooks, "worker": WorkerHooks}
"""The hooks of each process kind."""
