"""`/health`, `/version`, `/metrics`: for load balancers and monitors, without a key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

import engine
from engine.server.lifecycle import Phase
from engine.server.state import ServerState, state_of

router = APIRouter()
State = Annotated[ServerState, Depends(state_of)]


@router.get("/health")
async def health(state: State) -> Response:
    """200 while requests are taken; 503 while the model loads, once the engine is dead or the server is leaving."""
    serving = state.lifecycle.phase is Phase.SERVING and state.engine.alive()
    return Response(status_code=200 if serving else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """The engine's version."""
    return {"version": engine.__version__}


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Prometheus' text form."""
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
