"""The hooks: lifecycle calls that any number of plugins may implement.

A hook plugin registers in the entry-point group of the process in which it runs, `engine.hooks.frontend.v0`,
`engine.hooks.core.v0` or `engine.hooks.worker.v0`, and marks its functions:

    from engine.plugin import hookimpl

    @hookimpl
    def step_done(stats):
        print(stats.num_running)

An implementation may take fewer arguments than the hook has, so that a hook can grow without breaking anybody.
Arguments are passed by name, and are to be read, not changed. All implementations are plain functions: a coroutine
function is refused. The last plugin registered is called first, but for `tryfirst` and `trylast`. A hook that nobody
implements costs nothing.

Observing hooks listen: what they return is dropped, and an implementation that raises is disabled after some failures.
Deciding hooks fail closed: where an implementation raises, the request is refused (HookFailedError, over HTTP status
503 with the code `hook_failed`) and the hook stays. To refuse a request on purpose they raise RequestRefusedError,
which has a status of its own.
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
        """The engine was told to stop; every request has ended and been told of. The place to send on what is left.

        Called where `engine_started` was called, once, unless the process is killed or ends without `shutdown`.
        """

    @hook("check", thread=_REQUESTS, cost="once a prompt")
    def admit(self, request: RequestInfo) -> None:
        """May this request come in? Raise RequestRefusedError to refuse it.

        Called once a prompt, when its parameters have been verified and before anything is tokenised. A request that
        was admitted may still be refused, by another plugin or because its prompt does not fit: what counts requests
        under way counts them with `request_received` and `request_finished`, which come in pairs. Several prompts of
        one call (`LLM.generate`, or one HTTP request) are admitted one by one, and one refusal refuses all.
        """

    @hook(
        "chain",
        thread="the one that tokenises; a server tokenises long prompts in threads of their own, several at once",
        cost="once a prompt",
    )
    def rewrite_prompt(self, prompt: str, request: RequestInfo) -> str | None:
        """The text to tokenise in place of this one; None leaves it as it is.

        Called for prompts that are text, and for conversations, with the text that the chat template made of them.
        Prompts of token ids, and the pairs of `LLM.score` on a cross-encoder, are passed by. What is returned is what
        the answer calls the prompt, and what counts as prompt tokens. A result that is neither text nor None refuses
        the request.
        """

    @hook("filter", thread=_OUTPUTS, cost="once a sequence, and its callable once a step for each sequence")
    def output_filter(self, request: RequestInfo, index: int) -> OutputFilter | None:
        """A callable that every piece of this sequence's text goes through; None lets it pass. `index` says which of
        the request's sequences it is.

        The callable gets (text, last): the new text, which is never empty unless it is the last, and whether the
        sequence ends with it. What it returns is shown; it may hold text back, and give it out later, at the latest
        with the last piece. How the text is cut into pieces depends on tokens and load: a filter that looks for words
        has to hold back what might be the beginning of one. Streamed or not, the pieces are the same.

        It comes after stop strings: it never sees one that ended the text, nor what follows it. It changes the text
        alone: token ids and log probabilities still tell what the model wrote; a filter that hides something refuses
        `logprobs` in `admit`. A request without text (`detokenize=False`, pooling) has no filter; a beam search is
        filtered when it has ended, in one piece. Where the callable raises or returns no text, the sequence ends there
        with HookFailedError.
        """

    @hook("observing", thread=_REQUESTS, cost="once a sequence")
    def request_received(self, request: EngineRequest) -> None:
        """A request has been validated and tokenised and is about to be sent to the engine core.

        Called once for each sequence (n of a request). Each of them ends in one `request_finished`.
        """

    @hook("observing", thread=_OUTPUTS, cost="once a sequence, and about a microsecond for each sequence and step")
    def request_finished(self, summary: RequestSummary) -> None:
        """A sequence has ended, in whatever way: by itself, by an abort, by an error."""

    @hook("observing", thread=_OUTPUTS, cost="once an interval")
    def stats(self, stats: IntervalStats) -> None:
        """How the engine did in the last interval of ten seconds. For loggers of statistics.

        A server and `AsyncLLM` call it in each interval, idle or not. `LLM` and `LLMEngine` call it from `step`, with
        the first step after an interval has passed: nothing is told while nothing is asked.
        """

    @hook("observing", thread=f"{_SERVER}; `server` is for coroutine functions of routes", cost="once a start")
    def http_routes(self, router: Any, server: Any) -> None:
        """Add routes to the server: `router` is a `fastapi.APIRouter` of this plugin's own, `server` an
        `engine_server.plugins.ServerView`, for once it has started. Called when the server is put together, before
        `engine_started`.

        The routes, of HTTP alone, stand behind the server's own gate: API key, limits on the body, the request's id.
        Errors that they raise are answered in OpenAI's shape. A route that the server, or a plugin called before, has
        already cannot be taken over. Where a page for browsers is to come before its reader has given a key,
        `engine_server.plugins.without_key` marks its routes. An implementation that raises, or adds a route which is
        there already, is left out with all its routes, with a warning; it is then in quarantine.
        """

    @hook(
        "wrap",
        thread=f"{_SERVER}; the application runs in the event loop's: never block",
        cost="once a start, and the application once a HTTP request",
    )
    def http_middleware(self, app: Any, server: Any) -> Any:
        """An ASGI application around the routes; `server` as for `http_routes`. Called when the server is put together,
        before `engine_started`.

        The request has an id, the server is serving, and whoever asks for the body first gets all of it, within limits.
        What asks for API keys is one of these, the server's own plugin `api_keys`, around all but those that are
        `tryfirst`, too. It gets every scope, also of `/health` and `/metrics`. The tokens of a stream are written to
        the connection directly where no application puts a `send` of its own in the way. RequestRefusedError, raised
        before the answer began, is answered with its status; any other exception before the answer began with 503 and
        the code `hook_failed`. Where this hook raises or returns what cannot be called, every request is answered so,
        but for those that ask for no key: `/health`, `/metrics` and their like.
        """

    @hook(
        "observing",
        thread=f"{_SERVER}; collectors run in the event loop's, when `/metrics` is asked for: never block",
        cost="once a start, and the collectors once a scrape",
    )
    def metrics(self, registry: Any) -> None:
        """Register metrics, to be shown by `/metrics` below the engine's own: `registry` is a
        `prometheus_client.CollectorRegistry` of this plugin's own. Called when the server is put together.

        Where they cannot be collected, or bear a name that is there already, they are left out of that answer, and
        counted in `engine:hook_failures`; everybody else's are shown. An implementation that raises is left out with
        all its metrics, with a warning.
        """


class CoreHooks:
    """Hooks of the process that schedules."""

    @hook("observing", thread=_STEP_LOOP, cost="once a step")
    def step_done(self, stats: StepStats) -> None:
        """The results of one step have been taken in: tokens accepted, requests ended, pages returned. `stats` counts
        this step and what was since the start; it is a fresh object each time and may be kept."""

    @hook("observing", thread=_STEP_LOOP, cost="at most once a step, and a few microseconds for each block")
    def kv_events(self, events: list[KVEvent]) -> None:
        """What happened to the prefix cache in one step, in order: blocks stored, blocks removed, everything cleared.
        `events` holds at least one; it is plain data, which may be kept, or sent elsewhere with msgspec."""


class WorkerHooks:
    """Hooks of the processes that compute, on each rank."""

    @hook("observing", thread="the worker's main thread", cost="once a start; it delays the start")
    def worker_started(self, info: WorkerReady) -> None:
        """A worker has loaded its weights and allocated its KV cache, and is about to report that it is ready."""

    @hook(
        "observing",
        thread="the worker's main thread",
        cost="once a stop; it delays the stop, and an executor that waits too long kills the worker",
    )
    def worker_stopping(self, info: WorkerReady) -> None:
        """A worker that had started is about to let go of its model and its memory. Not called where it is killed."""


HOOKSPECS: dict[str, type] = {"frontend": FrontendHooks, "core": CoreHooks, "worker": WorkerHooks}
"""The hooks of each process kind."""
