"""The application over an `AsyncLLM`: the routes, and around them what every request passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import engine
from engine.embedding import AsyncLLM
from engine_server import errors
from engine_server.body_limit import MOST, BodyLimit
from engine_server.config import ServerConfig
from engine_server.gate import Gate
from engine_server.http_routes import EngineView
from engine_server.keys import AdminKey, KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.metrics.exposition import Exposition
from engine_server.middleware import wrap
from engine_server.request_id import RequestIds
from engine_server.responses.store import Background, OwnResponses, Responses, ResponseStore
from engine_server.routes import add_routes, describe_keys
from engine_server.state import Others, ServerState
from engine_server.stream import CLIENT_GONE, ClientGone, Direct


class Shared(NamedTuple):
    """What several API processes have together.

    Args:
        responses: those that are kept.
        background: what is computed while nobody waits.
        others: the processes.
        on_metrics: is given this process's own.
    """

    responses: Responses
    background: Background
    others: Others | None = None
    on_metrics: Callable[[Exposition], None] | None = None


def create_app(
    llm: AsyncLLM,
    model_names: tuple[str, ...],
    settings: ServerConfig,
    lifecycle: Lifecycle,
    keys: KeyRing,
    admin: AdminKey | None = None,
    shared: Shared | None = None,
) -> ASGIApp:
    """The app. It neither starts nor stops the engine; `engine_server.run` does.

    Args:
        llm: the engine.
        model_names: the first is what answers carry.
        settings: of the server.
        lifecycle: whether requests are taken.
        keys: those that let in.
        admin: the administrator's.
        shared: what several API processes have together; None: this is the only one.

    A request passes, in this order: its id is found or made; what browsers ask first, where other origins are allowed;
    the gate (is the server serving, is the key valid, may it ask for more); its body is read, within limits; the
    middleware of hook plugins; the route.
    """
    app = FastAPI(title="Engine", version=engine.__version__)
    errors.install(app)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ClientGone, on_gone)
    pages = add_routes(app, llm.hooks, EngineView(llm))
    describe_keys(app, keys=bool(keys), administered=bool(admin))
    inside = wrap(Direct(app, alone=not llm.hooks.http_middleware), llm.hooks)
    # Two prompts of token ids, as long as the model takes them, are welcome.
    most = MOST._replace(values=max(MOST.values, 2 * llm.max_model_len))
    limited = BodyLimit(inside, max_body=settings.max_body, timeout=settings.body_timeout, most=most)
    gate = Gate(
        limited,
        lifecycle=lifecycle,
        keys=keys,
        shutdown_timeout=settings.shutdown_timeout,
        pages=pages,
        admin=admin,
    )
    inner: ASGIApp = gate
    if settings.allowed_origins:
        inner = CORSMiddleware(
            gate,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    requests = RequestIds(inner, access_log=settings.access_log)
    metrics = Exposition(llm, model_names[0], requests, llm.hooks)
    if shared is None:
        own = OwnResponses(ResponseStore(settings.response_store_size, settings.response_store_time))
        shared = Shared(own, Background(lifecycle))
    app.state.server = ServerState(
        llm,
        model_names,
        lifecycle,
        metrics,
        settings.max_queue,
        settings.share_prefix_cache,
        settings,
        shared.responses,
        shared.background,
        shared.others,
    )
    if shared.on_metrics is not None:
        shared.on_metrics(metrics)
    return requests
