"""`/server_info` for clients; and below `/admin`, what only the administrator's key opens."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import Depends, Request
from fastapi.responses import Response

from engine.types.errors import EngineDeadError, EngineError
from engine_server.bodies import Answer
from engine_server.errors import APIError
from engine_server.json import JSON
from engine_server.operations.report import plugin_report, server_report
from engine_server.request_id import request_id
from engine_server.routes import State
from engine_server.state import ServerState

log = logging.getLogger("engine.server")


class Plugins(Answer):
    """`GET /admin/plugins`."""

    plugins: list[dict[str, Any]]


class Reset(Answer):
    """`POST /admin/kv/reset`, and the ranks of the cores that did."""

    reset: Literal["prefix_cache"]
    ranks: list[int]


class ProfileStarted(Answer):
    """`POST /admin/profile/start`, and the ranks of the cores that record."""

    profiling: bool
    ranks: list[int]


class ProfileStopped(Answer):
    """`POST /admin/profile/stop`."""

    profiling: bool
    files: Any


def administers(request: Request) -> None:
    """Refuse what the gate has not let in as an administrator's: these routes open in no other way."""
    if request.scope.get("state", {}).get("administers") is not True:
        raise APIError(403, "this is for administrators", code="admin_key_required")


ADMINISTERS = [Depends(administers)]


async def server_info(state: State) -> Response:
    """The version, the model, every setting but secrets, the drivers at work and why, broken plugins."""
    worker = state.engine.worker
    if worker is None:
        raise APIError(503, "the model is being loaded", code="starting")
    return JSON(server_report(state.engine.plan, worker, state.settings))


async def plugins(state: State) -> Response:
    """Every plugin that is installed, and what became of it."""
    return JSON(Plugins(plugins=plugin_report(state.engine.plan, state.engine.worker)))


async def reset_kv(request: Request, state: State) -> Response:
    """Every core forgets its prefix cache. Requests in progress go on with their own pages."""
    await _call(request, state, "reset_prefix_cache")
    if state.others is not None:
        state.others.cache_reset()
    return JSON(Reset(reset="prefix_cache", ranks=_living(state)))


async def start_profile(request: Request, state: State) -> Response:
    """Every worker of every core begins to record what it computes."""
    if state.engine.config.profile_dir is None:
        raise APIError(409, "there is no folder for profiles; start the server with --profile-dir", code="no_folder")
    await _call(request, state, "start_profile")
    return JSON(ProfileStarted(profiling=True, ranks=_living(state)))


async def stop_profile(request: Request, state: State) -> Response:
    """They write what they have recorded; the paths, on the workers' machine."""
    return JSON(ProfileStopped(profiling=False, files=await _call(request, state, "stop_profile")))


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
