"""What the server does, family by family: each is a hook plugin as any other, so `--plugins=-hooks:openai_routes`
leaves one out, and a stranger's may take its place. Light: every program with hooks imports this, whether it is a
server or not."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl

_EVENTS: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}


def _post(router: Any, path: str, answer: Any, function: Any, more: dict[int | str, Any] | None = None) -> None:
    """A route that takes a body; `more` are answers beside that one and errors."""
    from engine_server.errors import WITH_BODY, faults

    router.post(path, response_model=answer, responses=faults(*WITH_BODY) | (more or {}))(function)


class OpenAI:
    """OpenAI's API: chat, completions and models."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server.errors import faults
        from engine_server.openai import bodies, chat, completions, models

        _post(router, "/v1/chat/completions", bodies.ChatCompletion, chat.chat_completions, _EVENTS)
        _post(router, "/v1/completions", bodies.Completion, completions.completions, _EVENTS)
        router.get("/v1/models", response_model=models.Models)(models.models)
        router.get("/v1/models/{name:path}", response_model=models.Model, responses=faults(400, 404))(models.model)


class Anthropic:
    """Anthropic's API: messages."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server.anthropic import routes
        from engine_server.errors import ANY_ROUTE, WITH_BODY, AnthropicError, faults

        wrong = faults(*ANY_ROUTE, *WITH_BODY, shape=AnthropicError)
        router.post("/v1/messages", response_model=routes.Message, responses=wrong | _EVENTS)(routes.messages)
        router.post("/v1/messages/count_tokens", response_model=routes.TokenCount, responses=wrong)(routes.count)


class Responses:
    """OpenAI's newer API, whose responses the server may keep."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server.errors import faults
        from engine_server.responses import answer, routes

        kept, one = faults(400, 404), "/v1/responses/{identity}"
        _post(router, "/v1/responses", answer.ResponseAnswer, routes.respond, _EVENTS)
        router.get(one, response_model=answer.ResponseAnswer, responses=kept | _EVENTS)(routes.retrieve)
        router.delete(one, response_model=answer.Deleted, responses=kept)(routes.delete)
        router.post(f"{one}/cancel", response_model=answer.ResponseAnswer, responses=kept)(routes.cancel)
        router.get(f"{one}/input_items", response_model=answer.InputItems, responses=kept)(routes.input_items)


class Pooling:
    """The API of models that pool: vectors, labels and scores in place of text."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server.pooling import bodies, routes

        octets: dict[int | str, Any] = {200: {"content": {routes.OCTETS: {}}}}
        _post(router, "/v1/embeddings", bodies.Embeddings, routes.embeddings, octets)
        _post(router, "/pooling", bodies.Pooled, routes.pooling, octets)
        _post(router, "/classify", bodies.Classified, routes.classify)
        for path in ("/score", "/v1/score"):
            _post(router, path, bodies.Scores, routes.score)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            _post(router, path, bodies.Ranking, routes.rerank)


class Adapters:
    """Adapters that come and go while the server serves, where they may (--lora-dir)."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from fastapi.responses import Response

        from engine_server import adapter_routes as routes
        from engine_server.errors import WITH_BODY, faults

        text = {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}}
        for path, function in (("load", routes.load), ("unload", routes.unload)):
            answers: dict[int | str, Any] = {200: text, **faults(*WITH_BODY, 403, 404)}
            # A class that says nothing of its content: errors are JSON, and what is well is text.
            router.post(f"/v1/{path}_lora_adapter", response_class=Response, responses=answers)(function)


class Tokenization:
    """The API of the tokenizer alone."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server import tokenization as routes

        _post(router, "/tokenize", routes.Tokens, routes.tokenize)
        _post(router, "/detokenize", routes.Text, routes.detokenize)


class Operations:
    """What load balancers, monitors and administrators ask."""

    @hookimpl
    def http_routes(self, router: Any) -> None:
        from engine_server import operations as routes
        from engine_server.errors import faults

        told = {503: {"model": routes.Health, "description": "no requests are taken"}}
        router.get("/health", response_model=routes.Health, responses=told)(routes.health)
        for method in (router.get, router.post):  # the name under which hosting services ask
            method("/ping", response_model=routes.Health, responses=told)(routes.health)
        told = {503: {"model": routes.Readiness, "description": "no requests are taken"}}
        router.get("/ready", response_model=routes.Readiness, responses=told)(routes.ready)
        router.get("/load", response_model=routes.ServerLoad)(routes.load)
        router.get("/version", response_model=routes.Version)(routes.version)
        router.get("/server_info", response_model=dict[str, Any])(routes.server_info)
        closed: dict[str, Any] = {"responses": faults(403, 409)}
        router.get("/admin/plugins", response_model=routes.Plugins, **closed)(routes.plugins)
        router.post("/admin/kv/reset", response_model=routes.Reset, **closed)(routes.reset_kv)
        router.post("/admin/profile/start", response_model=routes.ProfileStarted, **closed)(routes.start_profile)
        router.post("/admin/profile/stop", response_model=routes.ProfileStopped, **closed)(routes.stop_profile)


class Metrics:
    """What the server has measured, for Prometheus. Without this nothing is measured."""

    @hookimpl
    def http_routes(self, router: Any, server: Any) -> None:
        from fastapi.responses import PlainTextResponse

        from engine_server.metrics.exposition import Exposition

        router.get("/metrics", response_class=PlainTextResponse)(Exposition(server).metrics)


class ApiKeys:
    """API keys and what each may ask for; the administrator's key."""

    @hookimpl(tryfirst=True)
    def http_middleware(self, app: Any, server: Any) -> Any:
        from engine_server.middleware import Keys

        return Keys(app, server.take_keys(), server.pages)
