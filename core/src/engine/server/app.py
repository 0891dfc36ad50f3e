"""The FastAPI application over a started `AsyncLLM`."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

import engine
from engine.frontend.async_llm import AsyncLLM
from engine.server import errors
from engine.server.disconnect import ClientGone
from engine.server.routes import chat, completions, health
from engine.server.state import ServerState


def create_app(llm: AsyncLLM, model_names: tuple[str, ...]) -> FastAPI:
    """The app. It neither starts nor stops the engine; `engine.server.run` does."""
    app = FastAPI(title="Engine", version=engine.__version__)
    app.state.server = ServerState(llm, model_names)
    errors.install(app)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the access log does

    app.add_exception_handler(ClientGone, on_gone)
    for routes in (health, completions, chat):
        app.include_router(routes.router)
    return app
