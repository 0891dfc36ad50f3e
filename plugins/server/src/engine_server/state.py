"""What the routes share: the engine, and the names under which its model is served."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol, cast

from fastapi import Request

from engine.embedding import AsyncLLM
from engine_server.config import ServerConfig
from engine_server.errors import APIError
from engine_server.lifecycle import Lifecycle
from engine_server.metrics.gathering import Gathered
from engine_server.responses.store import Background, Responses

QUEUE_RETRY_SECONDS = 1


class Others(Protocol):
    """The API processes beside this one, and itself."""

    async def gather(self) -> Gathered:
        """What all of them have counted."""
        ...

    def cache_reset(self) -> None:
        """Let the others know that the cores forgot their prefix caches."""
        ...


@dataclass(frozen=True)
class ServerState:
    """What the routes share. Made once, by `create_app`.

    Args:
        engine: started.
        lifecycle: whether requests are taken.
        settings: of the server.
        responses: those that are kept.
        background: what runs there.
        others: the API processes beside this one; None: there are none.
        created: seconds, for `/v1/models`.
    """

    engine: AsyncLLM
    lifecycle: Lifecycle
    settings: ServerConfig
    responses: Responses
    background: Background
    others: Others | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Under which requests may ask for the model; the first is what answers carry."""
        return self.engine.model_names

    def check_model(self, name: str | None) -> str:
        """The name to answer with; None means the first. Raises a 404 APIError for a model that is not served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise APIError(
                404,
                f"the model {name[:200]!r} does not exist; this server serves {served}",
                param="model",
                code="model_not_found",
            )
        return self.model_names[0] if name is None else name

    def admit(self, name: str | None) -> str:
        """The name to answer with, for what is to be queued, before any work on it. Raises as `check_model`, and a 429
        APIError where as many sequences wait as may. An engine with a free place takes any request."""
        name = self.check_model(name)
        if (waiting := self.engine.queue_length) >= self.settings.max_queue:
            raise APIError(
                429,
                f"{waiting} sequences wait for a place, and no more than {self.settings.max_queue} may (--max-queue); "
                f"try again in {QUEUE_RETRY_SECONDS} s",
                code="queue_full",
                headers={"Retry-After": str(QUEUE_RETRY_SECONDS)},
            )
        return name


async def state_of(request: Request) -> ServerState:
    """The app's state, for `Depends`. A coroutine, or it would run in a thread, for every request."""
    return cast(ServerState, request.app.state.server)
