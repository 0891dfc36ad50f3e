"""The application over an `AsyncLLM`: the routes, and around them what every request passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import engine
from engine.embedding import AsyncLLM
from engine_server import errors
from engine_server.config import ServerConfig
from engine_server.direct import Direct
from engine_server.keys import AdminKey, KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.metrics.gathering import Snapshot
from engine_server.middleware import MOST, BodyLimit, Gate, RequestIds
from engine_server.plugins import ServerView, add_routes, describe_keys, wrap
from engine_server.responses.store import Background, OwnResponses, Responses, ResponseStore
from engine_server.state import Others, ServerState
from engine_server.stream import CLIENT_GONE, ClientGone


class Shared(NamedTuple):
    """What several API processes have together.

    Args:
        responses: those that are kept.
        background: what is computed while nobody waits.
        others: the processes.
        count_for_others: see `ServerView`.
    """

    responses: Responses
    background: Background
    others: Others | None = None
    count_for_others: Callable[[Callable[[], Snapshot]], None] = lambda counted: None


def create_app(
    llm: AsyncLLM,
    settings: ServerConfig,
    lifecycle: Lifecycle,
    keys: KeyRing,
    admin: AdminKey | None = None,
    shared: Shared | None = None,
) -> ASGIApp:
    """The app. It neither starts nor stops the engine; `engine_server.run` does.

    Args:
        llm: the engine.
        settings: of the server.
        lifecycle: whether requests are taken.
        keys: those that let in.
        admin: the administrator's.
        shared: what several API processes have together; None: this is the only one.

    A request passes, in this order: its id is found or made; what browsers ask first, where other origins are allowed;
    is the server serving; limits on its body; the middleware of hook plugins, that of API keys among them; the route.

    Raises ConfigError where there are keys that no plugin asks for.
    """
    if shared is None:
        own = OwnResponses(ResponseStore(settings.response_store_size, settings.response_store_time))
        shared = Shared(own, Background(lifecycle))
    app = FastAPI(title="Engine", version=engine.__version__)
    errors.install(app)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ClientGone, on_gone)
    app.state.server = ServerState(llm, lifecycle, settings, shared.responses, shared.background, shared.others)
    responses: Counter[int] = Counter()
    server = ServerView(llm, responses, keys, admin or AdminKey(), shared.others, shared.count_for_others)
    add_routes(app, llm.hooks, server)
    describe_keys(app, keys=bool(keys), administered=bool(admin))
    inside = wrap(Direct(app), llm.hooks, server)
    server.check_keys()
    # Two prompts of token ids, as long as the model takes them, are welcome.
    most = MOST._replace(values=max(MOST.values, 2 * llm.max_model_len))
    limited = BodyLimit(inside, max_body=settings.max_body, timeout=settings.body_timeout, most=most)
    gate: ASGIApp = Gate(limited, lifecycle=lifecycle, shutdown_timeout=settings.shutdown_timeout, pages=server.pages)
    if settings.allowed_origins:
        gate = CORSMiddleware(
            gate,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(gate, responses, access_log=settings.access_log)
