"""The routes: the page and its files, and what the engine does now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from engine_playground.files import File, read_files
from engine_playground.live import live
from engine_server.plugins import without_key

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo
    from engine_server.plugins import ServerView

PAGE, FOLDER, LIVE = "/", "/playground/", "/playground/live"
INDEX = "index.html"

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer: nothing but our own files runs, nothing is asked of anybody else, and nobody frames the page."""


def add(
    router: APIRouter, server: ServerView, refresh: float, cells: int, info: Callable[[], EngineInfo | None]
) -> None:
    """Add all routes.

    Args:
        router: the plugin's own.
        server: what is looked at.
        refresh, cells: the plugin's options.
        info: the engine that stands; None before it does.
    """
    for file in read_files():
        path = PAGE if file.name == INDEX else FOLDER + file.name
        router.add_api_route(path, without_key(_serving(file)), methods=["GET"], include_in_schema=False)

    async def look() -> Response:
        content = await live(server, info(), refresh, cells)
        return Response(content, media_type="application/json", headers={**HEADERS, "Cache-Control": "no-store"})

    router.add_api_route(LIVE, look, methods=["GET"], include_in_schema=False)


def _serving(file: File) -> Callable[[Request], Response]:
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}  # asked for again each time, sent when new

    def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return serve
