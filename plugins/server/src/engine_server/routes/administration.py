"""`/server_info` for clients; and below `/admin`, what only the administrator's key opens."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.types.errors import EngineDeadError, EngineError
from engine_server.errors import APIError
from engine_server.json import JSON
from engine_server.report import plugin_report, server_report
from engine_server.request_id import request_id
from engine_server.state import ServerState, state_of

log = logging.getLogger("engine.server")

State = Annotated[ServerState, Depends(state_of)]


def administers(request: Request) -> None:
    """Refuse what the gate has not let in as an administrator's: these routes open in no other way."""
    if request.scope.get("state", {}).get("administers") is not True:
        raise APIError(403, "this is for administrators", code="admin_key_required")


router = APIRouter()
ADMINISTERS = [Depends(administers)]


@router.get("/server_info")
async def server_info(state: State) -> Response:
    """The version, the model, every setting but secrets, the drivers at work and why, broken plugins."""
    worker = state.engine.worker
    if worker is None:
        raise APIError(503, "the model is being loaded", code="starting")
    return JSON(server_report(state.engine.plan, worker, state.settings))


@router.get("/admin/plugins", dependencies=ADMINISTERS)
async def plugins(state: State) -> Response:
    """Every plugin that is installed, and what became of it."""
    return JSON({"plugins": plugin_report(state.engine.plan, state.engine.worker)})


@router.post("/admin/kv/reset", dependencies=ADMINISTERS)
async def reset_kv(request: Request, state: State) -> Response:
    """Every core forgets its prefix cache. Requests in progress go on with their own pages."""
    await _call(request, state, "reset_prefix_cache")
    if state.others is not None:
        state.others.cache_reset()
    return JSON({"reset": "prefix_cache", "ranks": _living(state)})


@router.post("/admin/profile/start", dependencies=ADMINISTERS)
async def start_profile(request: Request, state: State) -> Response:
    """Every worker of every core begins to record what it computes."""
    if state.engine.config.profile_dir is None:
        raise APIError(409, "there is no folder for profiles; start the server with --profile-dir", code="no_folder")
    await _call(request, state, "start_profile")
    return JSON({"profiling": True, "ranks": _living(state)})


@router.post("/admin/profile/stop", dependencies=ADMINISTERS)
async def stop_profile(request: Request, state: State) -> Response:
    """They write what they have recorded; the paths, on the workers' machine."""
    return JSON({"profiling": False, "files": await _call(request, state, "stop_profile")})


async def _call(request: Request, state: ServerState, method: str) -> Any:
    """Ask every core. What one refuses is a conflict with what is going on, not a fault."""
    log.warning("an administrator asks for %s (request %s)", method, request_id(request))
    try:
        return await state.engine.call(method)
    except EngineDeadError:
        raise
    except EngineError as error:
        raise APIError(409, str(error), code="conflict") from error


def _living(state: ServerState) -> list[int]:
    return [core.dp_rank for core in state.engine.cores if core.alive]
