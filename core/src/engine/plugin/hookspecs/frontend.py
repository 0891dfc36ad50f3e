"""The hooks of the process that tokenises and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plugin.hookspecs.markers import deciding, observing

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo, IntervalStats, OutputFilter, RequestInfo, RequestSummary
    from engine.types.request import EngineRequest


class FrontendHooks:
    """Hooks of the process that tokenises and answers: the caller's own with `LLM`, the server's with the server."""

    # -- the engine's life --------------------------------------------------------------------------------------------
    @observing
    def engine_started(self, info: EngineInfo) -> None:
        """The engine stands: its cores have loaded the model, requests can come.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            info: the model, and how much the engine takes.
        Process: frontend.
        Thread: the caller's of `LLM`, the event loop's of a server.
        Cost: once a start; it delays the start.
        """

    @observing
    def engine_stopping(self) -> None:
        """The engine was told to stop; every request has ended and been told of. The place to send on what is left.

        Called where `engine_started` was called, once, unless the process is killed or ends without `shutdown`.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments: none.
        Process: frontend.
        Thread: the one that calls `shutdown`.
        Cost: once a stop; it delays the stop.
        """

    # -- a request's life ---------------------------------------------------------------------------------------------
    @deciding("check")
    def admit(self, request: RequestInfo) -> None:
        """May this request come in? Raise RequestRefusedError to refuse it.

        Called once a prompt, when its parameters have been verified and before anything is tokenised. A request that
        was admitted may still be refused, by another plugin or because its prompt does not fit: what counts requests
        under way counts them with `request_received` and `request_finished`, which come in pairs. Several prompts of
        one call (`LLM.generate`, or one HTTP request) are admitted one by one, and one refusal refuses all.

        Deciding: RequestRefusedError refuses with its status; any other exception refuses with HookFailedError, and the
        hook stays.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`; the first refusal counts.
        Arguments:
            request: its id, parameters, priority, and what HTTP knows of it.
        Process: frontend.
        Thread: the one that takes requests (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once a prompt. Nothing at all where nobody decides.
        """

    @deciding("chain")
    def rewrite_prompt(self, prompt: str, request: RequestInfo) -> str | None:
        """The text to tokenise in place of this one; None leaves it as it is.

        Called for prompts that are text, and for conversations, with the text that the chat template made of them.
        Prompts of token ids, and the pairs of `LLM.score` on a cross-encoder, are passed by. What is returned is what
        the answer calls the prompt, and what counts as prompt tokens.

        Deciding: RequestRefusedError refuses with its status; any other exception, and a result that is neither text
        nor None, refuses with HookFailedError, and the hook stays.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`; each gets the text that the
            one before returned.
        Arguments:
            prompt: the text.
            request: its id, parameters, priority, and what HTTP knows of it.
        Process: frontend.
        Thread: the one that tokenises; long prompts of a server are tokenised in threads of their own, several at once.
        Cost: once a prompt. Nothing at all where nobody decides.
        """

    @deciding("filter")
    def output_filter(self, request: RequestInfo, index: int) -> OutputFilter | None:
        """A callable that every piece of this sequence's text goes through; None lets it pass.

        The callable gets (text, last): the new text, which is never empty unless it is the last, and whether the
        sequence ends with it. What it returns is shown; it may hold text back, and give it out later, at the latest
        with the last piece. How the text is cut into pieces depends on tokens and load: a filter that looks for words
        has to hold back what might be the beginning of one. Streamed or not, the pieces are the same.

        It comes after stop strings: it never sees one that ended the text, nor what follows it. It changes the text
        alone: token ids and log probabilities still tell what the model wrote; a filter that hides something refuses
        `logprobs` in `admit`. A request without text (`detokenize=False`, pooling) has no filter; a beam search is
        filtered when it has ended, in one piece.

        Deciding: where the callable raises or returns no text, the sequence ends there with HookFailedError; where this
        hook raises, or returns what cannot be called, the request is refused with it, and the hook stays.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`; each filter gets what the
            one before shows.
        Arguments:
            request: its id, parameters, priority, and what HTTP knows of it.
            index: which of its sequences.
        Process: frontend.
        Thread: the one that takes the core's news (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once a sequence, and its callable once a step for each sequence. Nothing at all where nobody decides.
        """

    @observing
    def request_received(self, request: EngineRequest) -> None:
        """A request has been validated and tokenised and is about to be sent to the engine core.

        Called once for each sequence (n of a request). Each of them ends in one `request_finished`.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            request: the request as it will travel. Read it, do not change it.
        Process: frontend.
        Thread: the one that takes requests (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once a request. Nothing at all where nobody listens.
        """

    @observing
    def request_finished(self, summary: RequestSummary) -> None:
        """A sequence has ended, in whatever way: by itself, by an abort, by an error.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            summary: times, counts of tokens, and how it ended.
        Process: frontend.
        Thread: the one that takes the core's news (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once a sequence, and about a microsecond for each sequence and step while somebody listens. Nothing where
            nobody does.
        """

    @observing
    def stats(self, stats: IntervalStats) -> None:
        """How the engine did in the last interval of ten seconds. For loggers of statistics.

        A server and `AsyncLLM` call it in each interval, idle or not. `LLM` and `LLMEngine` call it from `step`, with
        the first step after an interval has passed: nothing is told while nothing is asked.

        Observing: what it returns is dropped, and an implementation that raises is disabled after some failures.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            stats: counts of the interval, and the state at its end.
        Process: frontend.
        Thread: the one that takes the core's news (the caller's of `LLM`, the event loop's of a server): never block.
        Cost: once an interval. Nothing at all where nobody listens.
        """

    # -- HTTP ---------------------------------------------------------------------------------------------------------
    @observing
    def http_routes(self, router: Any, engine: Any) -> None:
        """Add routes to the server. Called when the server is put together, before `engine_started`.

        The routes stand behind the server's own gate: API key, limits on the body, the request's id. Errors that they
        raise are answered in OpenAI's shape. A route that the server has already cannot be taken over. Where a page for
        browsers is to come before its reader has given a key, `engine_server.http_routes.without_key` marks its routes.

        Observing: an implementation that raises, or that adds a route which is there already, is left out with all its
        routes, with a warning; it is then in quarantine.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`; of two plugins with one
            route the first has it.
        Arguments:
            router: a `fastapi.APIRouter` of this plugin's own.
            engine: an `engine_server.http_routes.EngineView`: what routes may ask the engine for, once it has started.
        Process: frontend, of a server only.
        Thread: the main thread. `engine` is for the event loop's: in coroutine functions of routes.
        Cost: once a start.
        """

    @deciding("wrap")
    def http_middleware(self, app: Any) -> Any:
        """An ASGI application around the routes. Called when the server is put together, before `engine_started`.

        It is the innermost of all middleware: the request has an id, has passed the gate, and its body has been read.
        It gets every scope, also of `/health` and `/metrics`.

        Deciding: RequestRefusedError, raised before the answer began, is answered with its status; any other exception
        before the answer began with 503 and the code `hook_failed`. Where this hook raises or returns what cannot be
        called, every request is answered so, but for those to `/health`, `/metrics` and `/version`.

        Order: the last plugin registered is the outermost, but for `tryfirst` (outermost of all) and `trylast`.
        Arguments:
            app: the application to call.
        Process: frontend, of a server only.
        Thread: this call: the main thread. The application: the event loop's, never block.
        Cost: once a start, and the application once a HTTP request. Nothing at all where nobody decides.
        """

    @observing
    def metrics(self, registry: Any) -> None:
        """Register metrics, to be shown by `/metrics` below the engine's own. Called when the server is put together.

        Where they cannot be collected, or bear a name that is there already, they are left out of that answer, and
        counted in `engine:hook_failures`; everybody else's are shown.

        Observing: an implementation that raises is left out with all its metrics, with a warning.

        Order: the last plugin registered is called first, but for `tryfirst` and `trylast`.
        Arguments:
            registry: a `prometheus_client.CollectorRegistry` of this plugin's own.
        Process: frontend, of a server only.
        Thread: this call: the main thread. Collectors: the event loop's, when `/metrics` is asked for: never block.
        Cost: once a start, and the collectors once a scrape.
        """
