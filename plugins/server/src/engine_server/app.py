"""The application over an `AsyncLLM`: the routes, and around them what every request passes."""

from __future__ import annotations

from collections import Counter

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

import engine
from engine_kit.async_llm import AsyncLLM
from engine_server import errors
from engine_server.adapters import ServedAdapters
from engine_server.bodies import MOST
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.middleware import Dispatch, Entry
from engine_server.plugins import ServerView, add_routes, describe_keys, wrap
from engine_server.responses.store import Background, ResponseShelf, ResponseStore
from engine_server.state import Others, ServerState
from engine_server.stream import CLIENT_GONE, ClientGone


def create_app(
    llm: AsyncLLM,
    settings: ServerConfig,
    lifecycle: Lifecycle,
    keys: KeyRing,
    others: Others | None = None,
    adapters: ServedAdapters | None = None,
) -> ASGIApp:
    """The app. It neither starts nor stops the engine; `engine_server.run` does.

    A request passes `Entry`, the middleware of hook plugins, that of API keys among them, `Dispatch`, and its route.

    Raises ConfigError where there are keys that no plugin asks for.
    """
    app = FastAPI(title="Engine", version=engine.__version__)
    errors.install(app)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ClientGone, on_gone)
    adapters = ServedAdapters(llm, settings) if adapters is None else adapters
    if others is None:
        kept = ResponseShelf(ResponseStore(settings.response_store_size, settings.response_store_time))
        app.state.server = ServerState(llm, adapters, lifecycle, settings, kept, Background(lifecycle))
    else:
        shelf, background = others.responses, others.background
        app.state.server = ServerState(llm, adapters, lifecycle, settings, shelf, background, others)
    responses: Counter[int] = Counter()
    server = ServerView(llm, responses, keys, others)
    add_routes(app, llm.hooks, server)
    describe_keys(app, keys)
    dispatch = Dispatch(app, lifecycle=lifecycle, shutdown_timeout=settings.shutdown_timeout, pages=server.pages)
    inside = wrap(dispatch, llm.hooks, server)
    server.check_keys()
    return Entry(
        inside,
        responses,
        max_body=settings.max_body,
        timeout=settings.body_timeout,
        # Two prompts of token ids, as long as the model takes them, are welcome.
        most=MOST._replace(values=max(MOST.values, 2 * llm.max_model_len)),
        access_log=settings.access_log,
        origins=settings.allowed_origins or (),
    )
