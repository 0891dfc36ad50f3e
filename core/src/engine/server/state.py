"""What the routes share: the engine, and the names under which its model is served."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from engine.frontend.async_llm import AsyncLLM
from engine.server.errors import APIError


@dataclass(frozen=True)
class ServerState:
    """Made once, by `create_app`.

    Args:
        engine: started.
        model_names: the first is what answers carry; requests may use any.
        created: seconds, for `/v1/models`.
    """

    engine: AsyncLLM
    model_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name to answer with; None means the first. Raises a 404 APIError for a model that is not served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise APIError(
                404,
                f"the model {name!r} does not exist; this server serves {served}",
                param="model",
                code="model_not_found",
            )
        return self.model_names[0] if name is None else name


def state_of(request: Request) -> ServerState:
    """The app's state, for `Depends`."""
    return cast(ServerState, request.app.state.server)


def new_id(prefix: str) -> str:
    """A fresh id as OpenAI's look, e.g. "chatcmpl-3f2a..."."""
    return f"{prefix}-{uuid.uuid4().hex}"
