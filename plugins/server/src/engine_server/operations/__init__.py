"""What load balancers, monitors and administrators ask."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.errors import faults
    from engine_server.operations import administration as admin
    from engine_server.operations import health

    told = {503: {"model": health.Health, "description": "no requests are taken"}}
    router.get("/health", response_model=health.Health, responses=told)(health.health)
    router.get("/ping", response_model=health.Health, responses=told)(health.ping)
    router.post("/ping", response_model=health.Health, responses=told)(health.ping)
    told = {503: {"model": health.Ready, "description": "no requests are taken"}}
    router.get("/ready", response_model=health.Ready, responses=told)(health.ready)
    router.get("/load", response_model=health.Load)(health.load)
    router.get("/version", response_model=health.Version)(health.version)
    router.get("/server_info", response_model=dict[str, Any])(admin.server_info)
    closed: dict[str, Any] = {"dependencies": admin.ADMINISTERS, "responses": faults(403, 409)}
    router.get("/admin/plugins", response_model=admin.Plugins, **closed)(admin.plugins)
    router.post("/admin/kv/reset", response_model=admin.Reset, **closed)(admin.reset_kv)
    router.post("/admin/profile/start", response_model=admin.ProfileStarted, **closed)(admin.start_profile)
    router.post("/admin/profile/stop", response_model=admin.ProfileStopped, **closed)(admin.stop_profile)
