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
from engine_server.metrics.exposition import Exposition
from engine_server.processes.gathering import Gathered
from engine_server.responses.store import Background, OwnResponses, Responses, ResponseStore

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
    """Made once, by `create_app`.

    Args:
        engine: started.
        model_names: the first is what answers carry; requests may use any.
        lifecycle: whether requests are taken.
        metrics: for `/metrics`.
        max_queue: most sequences that may wait.
        share_prefix_cache: requests with different API keys may find each other's cached prompts.
        settings: of the server; None: not told.
        responses: those that are kept.
        background: what runs there; by itself one of its own.
        others: the API processes beside this one; None: there are none.
        created: seconds, for `/v1/models`.
    """

    engine: AsyncLLM
    model_names: tuple[str, ...]
    lifecycle: Lifecycle
    metrics: Exposition
    max_queue: int
    share_prefix_cache: bool = False
    settings: ServerConfig | None = None
    responses: Responses = field(default_factory=lambda: OwnResponses(ResponseStore(0, 0.0)))
    background: Background = field(default=None)  # type: ignore[assignment]
    others: Others | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if self.background is None:
            object.__setattr__(self, "background", Background(self.lifecycle))

    @property
    def force_include_usage(self) -> bool:
        """Every stream ends with an event that counts tokens."""
        return self.settings is not None and self.settings.enable_force_include_usage

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

    def check_queue(self) -> None:
        """Raises a 429 APIError where as many sequences wait as may. An engine with a free place takes any request."""
        if (waiting := self.engine.queue_length) >= self.max_queue:
            raise APIError(
                429,
                f"{waiting} sequences wait for a place, and no more than {self.max_queue} may (--max-queue); "
                f"try again in {QUEUE_RETRY_SECONDS} s",
                code="queue_full",
                headers={"Retry-After": str(QUEUE_RETRY_SECONDS)},
            )


async def state_of(request: Request) -> ServerState:
    """The app's state, for `Depends`. A coroutine, or it would run in a thread, for every request."""
    return cast(ServerState, request.app.state.server)
