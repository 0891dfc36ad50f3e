"""`/health`, `/v1/models`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from engine.server.errors import APIError
from engine.server.state import ServerState, state_of

router = APIRouter()
State = Annotated[ServerState, Depends(state_of)]


@router.get("/health")
async def health(state: State) -> Response:
    """200 while the engine lives, 503 once it is dead."""
    return Response(status_code=200 if state.engine.alive() else 503)


@router.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """The served names."""
    return {"object": "list", "data": [_card(state, name) for name in state.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict[str, Any]:
    """One served name, or 404."""
    if name not in state.model_names:
        raise APIError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    return _card(state, name)


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "engine",
        "root": state.model_names[0],
        "max_model_len": state.engine.max_model_len,
    }
