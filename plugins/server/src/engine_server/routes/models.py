"""`/v1/models`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from engine_server.state import ServerState, state_of

router = APIRouter()
State = Annotated[ServerState, Depends(state_of)]


@router.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """The served names."""
    return {"object": "list", "data": [_card(state, name) for name in state.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict[str, Any]:
    """One served name, or 404."""
    return _card(state, state.check_model(name))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "engine",
        "root": state.model_names[0],
        "max_model_len": state.engine.max_model_len,
        "default_sampling_params": state.engine.sampling_defaults.params,
    }
