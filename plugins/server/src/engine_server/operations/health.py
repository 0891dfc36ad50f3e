"""`/health`, `/ping`, `/ready`, `/load`, `/version`: for load balancers and monitors, without a key."""

from __future__ import annotations

from typing import Literal

from fastapi import Response

import engine
from engine_server.bodies import Answer
from engine_server.json import JSON
from engine_server.lifecycle import Phase
from engine_server.routes import State
from engine_server.state import ServerState


class Rank(Answer):
    """An engine core, and how busy it is."""

    rank: int
    alive: bool
    stopped: bool
    running: int
    waiting: int
    kv_cache_usage: float


class Health(Answer):
    """`GET /health`."""

    status: Literal["ok", "degraded", "unavailable"]
    ranks: list[Rank]


class Ready(Answer):
    """`GET /ready`."""

    status: str


class Load(Answer):
    """`GET /load`."""

    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float
    ranks: list[Rank]


class Version(Answer):
    """`GET /version`."""

    version: str


async def health(state: State) -> Response:
    """200 while requests are taken, which one living engine core is enough for; 503 while the model loads, once the
    engine is dead or the server is leaving, and while something has stopped the engine's processes. The body tells of
    each core."""
    serving = state.lifecycle.phase is Phase.SERVING and state.engine.answers()
    ranks = _ranks(state)
    whole = all(rank.alive and not rank.stopped for rank in ranks)
    status: Literal["ok", "degraded", "unavailable"] = "unavailable"
    if serving:
        status = "ok" if whole else "degraded"
    return JSON(Health(status=status, ranks=ranks), 200 if serving else 503)


async def ping(state: State) -> Response:
    """As `/health`, by the name under which hosting services ask."""
    return await health(state)


async def ready(state: State) -> Response:
    """200 while requests are taken, and only then; else 503, with the reason in one word."""
    status = state.lifecycle.phase.value
    if state.lifecycle.phase is Phase.SERVING and not state.engine.answers():
        status = "stopped" if state.engine.alive() else "dead"
    return JSON(Ready(status=status), 200 if status == Phase.SERVING.value else 503)


async def load(state: State) -> Response:
    """How busy the server is: requests in progress (as vLLM's `server_load`), sequences, and the KV cache, 0 to 1."""
    ranks = _ranks(state)
    others = None if state.others is None else await state.others.gather()
    living = [rank for rank in ranks if rank.alive]
    return JSON(
        Load(
            server_load=state.lifecycle.active if others is None else others.active,
            running=sum(rank.running for rank in living),
            waiting=sum(rank.waiting for rank in living),
            kv_cache_usage=sum(rank.kv_cache_usage for rank in living) / len(living) if living else 0.0,
            ranks=ranks,
        )
    )


async def version() -> Response:
    """The engine's version."""
    return JSON(Version(version=engine.__version__))


def _ranks(state: ServerState) -> list[Rank]:
    return [
        Rank(
            rank=core.dp_rank,
            alive=core.alive,
            stopped=core.stopped,
            running=core.num_running,
            waiting=core.num_waiting,
            kv_cache_usage=core.kv_usage,
        )
        for core in state.engine.cores
    ]
