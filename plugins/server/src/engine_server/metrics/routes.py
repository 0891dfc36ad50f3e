"""`/metrics`, without a key."""

from __future__ import annotations

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine_server.routes import State


async def metrics(state: State) -> Response:
    """Prometheus' text form; of several API processes as of one."""
    text = state.metrics.text() if state.others is None else state.metrics.merged(await state.others.gather())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
