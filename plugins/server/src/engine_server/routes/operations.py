"""`/health`, `/ping`, `/ready`, `/load`, `/version`, `/metrics`: for load balancers and monitors, without a key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

import engine
from engine_server.json import JSON
from engine_server.lifecycle import Phase
from engine_server.state import ServerState, state_of

router = APIRouter()
State = Annotated[ServerState, Depends(state_of)]


@router.get("/health")
async def health(state: State) -> Response:
    """200 while requests are taken, which one living engine core is enough for; 503 while the model loads, once the
    engine is dead or the server is leaving, and while something has stopped the engine's processes. The body tells of
    each core."""
    serving = state.lifecycle.phase is Phase.SERVING and state.engine.answers()
    ranks = _ranks(state)
    whole = all(rank["alive"] and not rank["stopped"] for rank in ranks)
    status = "unavailable" if not serving else "ok" if whole else "degraded"
    return JSON({"status": status, "ranks": ranks}, 200 if serving else 503)


@router.get("/ping")
@router.post("/ping")
async def ping(state: State) -> Response:
    """As `/health`, by the name under which hosting services ask."""
    return await health(state)


@router.get("/ready")
async def ready(state: State) -> Response:
    """200 while requests are taken, and only then; else 503, with the reason in one word."""
    status = state.lifecycle.phase.value
    if state.lifecycle.phase is Phase.SERVING and not state.engine.answers():
        status = "stopped" if state.engine.alive() else "dead"
    return JSON({"status": status}, 200 if status == Phase.SERVING.value else 503)


@router.get("/load")
async def load(state: State) -> Response:
    """How busy the server is: requests in progress (as vLLM's `server_load`), sequences, and the KV cache, 0 to 1."""
    ranks = _ranks(state)
    others = None if state.others is None else await state.others.gather()
    living = [rank for rank in ranks if rank["alive"]]
    return JSON(
        {
            "server_load": state.lifecycle.active if others is None else others.active,
            "running": sum(rank["running"] for rank in living),
            "waiting": sum(rank["waiting"] for rank in living),
            "kv_cache_usage": sum(rank["kv_cache_usage"] for rank in living) / len(living) if living else 0.0,
            "ranks": ranks,
        }
    )


def _ranks(state: ServerState) -> list[dict[str, Any]]:
    return [
        {
            "rank": core.dp_rank,
            "alive": core.alive,
            "stopped": core.stopped,
            "running": core.num_running,
            "waiting": core.num_waiting,
            "kv_cache_usage": core.kv_usage,
        }
        for core in state.engine.cores
    ]


@router.get("/version")
async def version() -> dict[str, str]:
    """The engine's version."""
    return {"version": engine.__version__}


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Prometheus' text form; of several API processes as of one."""
    text = state.metrics.text() if state.others is None else state.metrics.merged(await state.others.gather())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
