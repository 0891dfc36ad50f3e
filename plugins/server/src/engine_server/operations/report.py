"""What a server says of itself: settings without secrets, the drivers at work and why, the plugins that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import engine
from engine.embedding import EngineSettings, Launch, broken_plugins, capacity
from engine.plugin import Selection
from engine.plugin.candidate import Candidate
from engine.plugin.explain import by_driver, refusals, why
from engine.plugin.plugin_list import only
from engine.plugin.points import HOOK_PROCESSES, POINTS
from engine.types.start import BrokenPlugin, WorkerReady
from engine_server.config import ServerConfig
from engine_server.keys import is_secret
from engine_server.settings import ServerSettings

HIDDEN = "(hidden)"
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]*@")


def server_report(plan: Launch, worker: WorkerReady, settings: ServerConfig | None) -> dict[str, Any]:
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
        "server": _server_settings(settings),
        "drivers": [_driver(served) for served in by_driver(plan.selections)],
        "quarantined": [_broken(plugin) for plugin in broken_plugins(plan, worker)],
    }


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


def _broken(plugin: BrokenPlugin) -> dict[str, Any]:
    names = ("point", "driver", "distribution", "version", "found", "remedy")
    return {name: getattr(plugin, name) for name in names}


def _settings(plan: Launch) -> dict[str, Any]:
    """The engine's, as they are used: what the launcher found out stands in place of "auto"."""
    config, start = plan.config, plan.start
    found = {
        "model": plan.files.name,
        "tokenizer": plan.tokenizer_folder,
        "served_model_name": ",".join(plan.model_names),
        "dtype": start.worker.dtype,
        "kv_cache_dtype": start.worker.kv_cache_dtype or start.worker.dtype,
        "max_model_len": plan.max_model_len,
        "in_flight": start.in_flight,
        "step_timeout": start.step_timeout,
    }
    values = {
        s.name: HIDDEN if s.secret else found.get(s.name, getattr(config, s.name))
        for s in EngineSettings.declared.values()
    }
    return {**values, "points": dict(config.points), "options": without_secrets(config.options)}


def _server_settings(settings: ServerConfig | None) -> dict[str, Any]:
    if settings is None:
        return {}
    values = {s.name: getattr(settings, s.name) for s in ServerSettings.declared.values()}
    for setting in ServerSettings.declared.values():
        if setting.secret and values[setting.name] is not None:
            values[setting.name] = HIDDEN
    return values


def without_secrets(value: Any, name: str = "") -> Any:
    """Options of drivers with what may be a secret hidden: by an option's name, and the user in a URL."""
    if is_secret(name) and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _USER_IN_URL.sub(f"{HIDDEN}@", str(value))


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
