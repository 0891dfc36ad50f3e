"""The hooks: lifecycle calls that any number of plugins may implement.

A hook plugin registers in the entry-point group of the process in which it runs, `engine.hooks.frontend.v0`,
`engine.hooks.core.v0` or `engine.hooks.worker.v0`, and marks its functions:

    from engine.plugin import hookimpl

    @hookimpl
    def step_done(stats):
        print(stats.num_running)

An implementation may take fewer arguments than the hook has, so that a hook can grow without breaking anybody.
Arguments are passed by name. All implementations are plain functions: a coroutine function is refused.

Observing hooks listen: what they return is dropped, and an implementation that raises is disabled after some failures.
Deciding hooks fail closed: where an implementation raises, the request is refused (HookFailedError, over HTTP status
503 with the code `hook_failed`) and the hook stays. To refuse a request on purpose they raise RequestRefusedError.
"""

from __future__ import annotations

from engine.plugin.hookspecs.core import CoreHooks
from engine.plugin.hookspecs.frontend import FrontendHooks
from engine.plugin.hookspecs.markers import Kind, hookimpl, kind_of
from engine.plugin.hookspecs.worker import WorkerHooks

__all__ = ["HOOKSPECS", "CoreHooks", "FrontendHooks", "Kind", "WorkerHooks", "hookimpl", "kind_of"]

HOOKSPECS: dict[str, type] = {"frontend": FrontendHooks, "core": CoreHooks, "worker": WorkerHooks}
"""The hooks of each process kind."""
