"""The hooks: lifecycle calls that any number of plugins may implement.

    from engine.plugin import hookimpl

    @hookimpl
    def step_done(stats):
        print(stats.num_running)

A plugin registers in the entry-point group of the process in which it runs, `engine.hooks.<process>.v0`. Arguments are
passed by name, and are to be read, not changed; an implementation may take fewer than the hook has. All are plain
functions. The last plugin registered is called first, but for `tryfirst` and `trylast`.

Observing hooks listen: what they return is dropped, and an implementation that raises is disabled after some failures.
Deciding hooks fail closed: where an implementation raises, the request is refused (HookFailedError, over HTTP status
503 with the code `hook_failed`) and the hook stays. To refuse a request on purpose they raise RequestRefusedError.
docs/plugins/hooks.md has examples, and what else each hook is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import pluggy

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo, IntervalStats, OutputFilter, RequestInfo, RequestSummary
    from engine.types.kv import KVEvent
    from engine.types.outputs import StepStats
    from engine.types.request import EngineRequest
    from engine.types.start import WorkerReady

F = TypeVar("F", bound=Callable[..., Any])

Kind = Literal["observing", "check", "chain", "filter", "wrap"]
"""What a hook does: "observing" listens, all others decide.

- `check`: each implementation may raise; what it returns is dropped, and the first refusal counts.
- `chain`: each gets, as the first argument, the text that the one before returned; None leaves it as it is.
- `filter`: each may return a callable, which then filters one sequence's text, in that order.
- `wrap`: each returns the application that takes the place of the one it was given; the first called is the outermost.
"""


class HookFacts(NamedTuple):
    """What a hook's specification states beside its docstring.

    Attributes:
        kind: what it does.
        thread: in which it is called, and what that means for implementations.
        cost: how often it is called while somebody implements it, and what that costs.
    """

    kind: Kind
    thread: str
    cost: str


hookimpl = pluggy.HookimplMarker("engine")
"""Marks a function as the implementation of the hook of its name (`tryfirst=True`, `trylast=True` order it)."""

_hookspec = pluggy.HookspecMarker("engine")

_CALLER = "the caller's of `LLM`, the event loop's of a server"
_REQUESTS = f"the one that takes requests ({_CALLER}): never block"
_OUTPUTS = f"the one that takes the core's outputs ({_CALLER}): never block"
_STEP_LOOP = "the step loop's: its time is added to each step, so hand work to a thread of your own"
_SERVER = "the main thread, of a server only"
_TOKENISING = "the one that tokenises; a server tokenises long prompts in threads of their own, several at once"
_APPLICATION = "the application runs in the event loop's: never block"
_COLLECTORS = "collectors run in the event loop's, when `/metrics` is asked for: never block"
_WORKER = "the worker's main thread"


def hook(kind: Kind, *, thread: str, cost: str) -> Callable[[F], F]:
    """Declare a hook; the arguments are those of `HookFacts`."""

    def mark(function: F) -> F:
        function.engine_hook = HookFacts(kind, thread, cost)  # type: ignore[attr-defined]
        return _hookspec(function)

    return mark


def facts_of(specification: Callable[..., Any]) -> HookFacts:
    """What a hook's specification states."""
    facts: HookFacts = specification.engine_hook  # type: ignore[attr-defined]
    return facts


class FrontendHooks:
    """Hooks of the process that tokenises and answers: the caller's own with `LLM`, the server's with the server."""

    @hook("observing", thread=_CALLER, cost="once a start; it delays the start")
    def engine_started(self, info: EngineInfo) -> None:
        """The engine stands: its cores have loaded the model, requests can come."""

    @hook("observing", thread="the one that calls `shutdown`", cost="once a stop; it delays the stop")
    def engine_stopping(self) -> None:
        """The engine was told to stop; every request has ended and been told of. The place to send on what is left."""

    @hook("check", thread=_REQUESTS, cost="once a prompt")
    def admit(self, request: RequestInfo) -> None:
        """May this request come in? Raise RequestRefusedError to refuse it. Its parameters have been verified, nothing
        is tokenised yet. One refusal refuses all prompts of a call."""

    @hook("chain", thread=_TOKENISING, cost="once a prompt")
    def rewrite_prompt(self, prompt: str, request: RequestInfo) -> str | None:
        """The text to tokenise in place of this one; None leaves it as it is. Also called with the text that the chat
        template made of a conversation; not with token ids, nor with the pairs of a cross-encoder."""

    @hook("filter", thread=_OUTPUTS, cost="once a sequence, and its callable once a step for each sequence")
    def output_filter(self, request: RequestInfo, index: int) -> OutputFilter | None:
        """A callable that every piece of this sequence's text goes through; None lets it pass. It gets (text, last) and
        returns what is shown; what it holds back it gives out with the last piece at the latest. `index` says which of
        the request's sequences it is."""

    @hook("observing", thread=_REQUESTS, cost="once a sequence")
    def request_received(self, request: EngineRequest) -> None:
        """A sequence has been validated and tokenised, and is about to be sent to the engine core. Each ends in one
        `request_finished`."""

    @hook("observing", thread=_OUTPUTS, cost="once a sequence, and about a microsecond for each sequence and step")
    def request_finished(self, summary: RequestSummary) -> None:
        """A sequence has ended, in whatever way: by itself, by an abort, by an error."""

    @hook("observing", thread=_OUTPUTS, cost="once an interval")
    def stats(self, stats: IntervalStats) -> None:
        """How the engine did in the last interval of ten seconds. A server and `AsyncLLM` tell it idle or not, `LLM`
        with the first step after an interval has passed."""

    @hook("observing", thread=f"{_SERVER}; `server` is for coroutine functions of routes", cost="once a start")
    def http_routes(self, router: Any, server: Any) -> None:
        """Add routes to the server, before `engine_started`: `router` is a `fastapi.APIRouter` of this plugin's own,
        `server` an `engine_server.plugins.ServerView`. Who raises, or adds a route which is there already, is left out
        with all its routes, with a warning."""

    @hook("wrap", thread=f"{_SERVER}; {_APPLICATION}", cost="once a start, and the application once a HTTP request")
    def http_middleware(self, app: Any, server: Any) -> Any:
        """An ASGI application around the routes, made before `engine_started`; `server` as for `http_routes`. The
        request has an id, and whoever asks for the body first gets all of it, within limits. It gets every scope, also
        while the server takes no requests yet, or no more."""

    @hook("observing", thread=f"{_SERVER}; {_COLLECTORS}", cost="once a start, and the collectors once a scrape")
    def metrics(self, registry: Any) -> None:
        """Register metrics, to be shown by `/metrics` below the engine's own: `registry` is a
        `prometheus_client.CollectorRegistry` of this plugin's own. Who raises is left out, with a warning."""


class CoreHooks:
    """Hooks of the process that schedules."""

    @hook("observing", thread=_STEP_LOOP, cost="once a step")
    def step_done(self, stats: StepStats) -> None:
        """The results of one step have been taken in: tokens accepted, requests ended, pages returned. `stats` is a
        fresh object each time and may be kept."""

    @hook("observing", thread=_STEP_LOOP, cost="at most once a step, and a few microseconds for each block")
    def kv_events(self, events: list[KVEvent]) -> None:
        """What happened to the prefix cache in one step, in order: blocks stored, blocks removed, everything cleared.
        `events` holds at least one; it is plain data, which may be kept, or sent elsewhere with msgspec."""


class WorkerHooks:
    """Hooks of the processes that compute, on each rank."""

    @hook("observing", thread=_WORKER, cost="once a start; it delays the start")
    def worker_started(self, info: WorkerReady) -> None:
        """A worker has loaded its weights and allocated its KV cache, and is about to report that it is ready."""

    @hook("observing", thread=_WORKER, cost="once a stop; an executor that waits too long kills the worker")
    def worker_stopping(self, info: WorkerReady) -> None:
        """A worker that had started is about to let go of its model and its memory. Not called where it is killed."""


HOOKSPECS: dict[str, type] = {"frontend": FrontendHooks, "core": CoreHooks, "worker": WorkerHooks}
"""The hooks of each process kind."""
