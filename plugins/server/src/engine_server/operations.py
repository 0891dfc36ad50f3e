"""What load balancers, monitors and administrators ask: `/health` and its like, `/server_info`, and below `/admin` what
only the administrator's key opens."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import Request, Response

import engine
from engine.embedding import EngineSettings, Launch, Setting, broken_plugins, capacity
from engine.plugin import Selection
from engine.plugin.candidate import Candidate
from engine.plugin.plugin_list import only
from engine.plugin.points import HOOK_PROCESSES, POINTS
from engine.types.errors import EngineDeadError, EngineError
from engine.types.start import BrokenPlugin, WorkerReady
from engine_kit.chosen_drivers import by_driver, refusals, why
from engine_server.bodies import JSON, Answer
from engine_server.config import ServerConfig
from engine_server.errors import APIError
from engine_server.keys import is_secret
from engine_server.lifecycle import Phase
from engine_server.middleware import request_id
from engine_server.settings import ServerSettings
from engine_server.state import ServerState, State

HIDDEN = "(hidden)"
_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]*@")
_IN_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]*")
log = logging.getLogger("engine.server")


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


class Readiness(Answer):
    """`GET /ready`."""

    status: str


class ServerLoad(Answer):
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


async def ready(state: State) -> Response:
    """200 while requests are taken, and only then; else 503, with the reason in one word."""
    status = state.lifecycle.phase.value
    if state.lifecycle.phase is Phase.SERVING and not state.engine.answers():
        status = "stopped" if state.engine.alive() else "dead"
    return JSON(Readiness(status=status), 200 if status == Phase.SERVING.value else 503)


async def load(state: State) -> Response:
    """How busy the server is: requests in progress (as vLLM's `server_load`), sequences, and the KV cache, 0 to 1."""
    ranks = _ranks(state)
    others = None if state.others is None else await state.others.gather()
    living = [rank for rank in ranks if rank.alive]
    return JSON(
        ServerLoad(
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
    await _call(request, state, "worker.start_profile")
    return JSON(ProfileStarted(profiling=True, ranks=_living(state)))


async def stop_profile(request: Request, state: State) -> Response:
    """They write what they have recorded; the paths, on the workers' machine."""
    return JSON(ProfileStopped(profiling=False, files=await _call(request, state, "worker.stop_profile")))


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


def server_report(plan: Launch, worker: WorkerReady, settings: ServerConfig) -> dict[str, Any]:
    """Plain data about a server that serves."""
    start = plan.start.worker
    tokens, _ = capacity(plan, worker)
    return {
        "version": engine.__version__,
        "model": {
            "name": plan.model_name,
            "folder": plan.files.folder,
            "architecture": plan.model.architecture,
            "tasks": ["generate"] if plan.model.generates else list(plan.model.pooler.tasks),
            "parameters": worker.num_parameters,
            "weight_bytes": worker.weight_bytes,
            "dtype": start.dtype,
            "device": start.device,
            "max_model_len": plan.max_model_len,
        },
        "kv_cache": {"bytes": worker.cache_bytes, "pages": worker.num_pages, "tokens": tokens},
        "settings": _settings(plan),
        "server": _values(ServerSettings.declared, vars(settings)),
        "drivers": [_driver(served) for served in by_driver(plan.selections)],
        "quarantined": [{name: getattr(one, name) for name in _BROKEN} for one in broken_plugins(plan, worker)],
    }


_BROKEN = ("point", "driver", "distribution", "version", "found", "remedy")


def plugin_report(plan: Launch, worker: WorkerReady | None) -> list[dict[str, Any]]:
    """Every plugin that is installed: "active" (at work, or heard), "installed", "broken", "outdated" or "denied".

    Commands are no part of a server, and are "installed".
    """
    registry, broken = plan.registry, {_name(plugin): plugin for plugin in broken_plugins(plan, worker)}
    active = {_name(selection.candidate) for selection in plan.selections}
    rows = []
    hooks = [f"hooks.{process}" for process in HOOK_PROCESSES]
    for point in (*POINTS, *hooks, "commands"):
        for candidate in registry.candidates(point):
            name = _name(candidate)
            if (plugin := broken.get(name)) is not None:
                rows.append(_row(candidate, "broken", plugin.found, plugin.remedy))
            else:
                rows.append(_row(candidate, "active" if name in active or point in hooks else "installed"))
        rows += [_row(c, "outdated", f"it speaks v{c.major} of {point}") for c in registry.outdated(point)]
        rows += [_row(c, "denied", registry.denied[c]) for c in only(registry.denied, point)]
    return rows


def _name(plugin: Candidate | BrokenPlugin) -> tuple[str, str, str]:
    driver = plugin.name if isinstance(plugin, Candidate) else plugin.driver
    return plugin.point, driver, plugin.distribution


def _row(candidate: Candidate, state: str, found: str = "", remedy: str = "") -> dict[str, Any]:
    return {
        "point": candidate.point,
        "name": candidate.name,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "state": state,
        "found": found or None,
        "remedy": remedy or None,
    }


def _settings(plan: Launch) -> dict[str, Any]:
    """The engine's, as they are used: what the launcher found out stands in place of "auto"."""
    config, start = plan.config, plan.start
    found = {
        "model": plan.files.name,
        "tokenizer": plan.start.tokenizer_folder,
        "served_model_name": ",".join(plan.model_names),
        "dtype": start.worker.dtype,
        "kv_cache_dtype": start.worker.kv_cache_dtype or start.worker.dtype,
        "max_model_len": plan.max_model_len,
        "in_flight": start.in_flight,
        "step_timeout": start.step_timeout,
    }
    values = _values(EngineSettings.declared, {**vars(config), **found})
    return {**values, "points": dict(config.points), "options": without_secrets(config.options)}


def _values(declared: Mapping[str, Setting], values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings that are declared, secrets hidden."""
    shown = {one.name: values[one.name] for one in declared.values()}
    return {name: HIDDEN if one.secret and shown[name] is not None else shown[name] for name, one in declared.items()}


def without_secrets(value: Any, name: str = "") -> Any:
    """Options of drivers with what may be a secret hidden: by an option's name, and in a URL the user, and what its
    query names so."""
    if is_secret(name) and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    shown = _USER_IN_URL.sub(f"{HIDDEN}@", str(value))
    return _IN_QUERY.sub(lambda found: f"{found[1]}={HIDDEN}" if is_secret(found[1]) else found[0], shown)


def _driver(served: list[Selection]) -> dict[str, Any]:
    candidate = served[0].candidate
    return {
        "point": candidate.point,
        "driver": candidate.name,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "serves": [selection.kind for selection in served if selection.kind],
        "why": why(served),
        "unfit": {name: list(reasons) for name, reasons in refusals(served).items()},
    }
