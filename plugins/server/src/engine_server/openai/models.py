"""`/v1/models`."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import Response

from engine_server.bodies import JSON, Answer
from engine_server.state import ServerState, State


class Model(Answer):
    """A name under which the model is served, `root` being the first; or an adapter of it, whose folder is `root`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int
    default_sampling_params: dict[str, Any]


class Models(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


async def models(state: State) -> Response:
    """The served names."""
    return JSON(Models(object="list", data=[_card(state, name) for name in state.model_names]))


async def model(name: str, state: State) -> Response:
    """One served name, or 404."""
    return JSON(_card(state, state.check_model(name)))


def _card(state: ServerState, name: str) -> Model:
    path = state.adapters.path(name)
    return Model(
        id=name,
        object="model",
        created=state.created,
        owned_by="engine",
        root=state.model_names[0] if path is None else path,
        parent=None if path is None else state.model_names[0],
        max_model_len=state.engine.max_model_len,
        default_sampling_params=dict(state.engine.sampling_defaults.params),
    )
