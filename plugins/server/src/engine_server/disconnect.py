"""Stop the work of a request whose client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

T = TypeVar("T")

CLIENT_GONE = 499
"""The status of an answer that nobody reads any more: the access log does."""


class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client disconnects. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # else what it raised meanwhile would be logged as lost


async def left(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
