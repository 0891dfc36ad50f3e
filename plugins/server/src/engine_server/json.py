"""JSON by orjson: requests and answers. Strict: no NaN, no lone surrogates, and not nested more than 1024 deep."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response


class JSON(Response):
    """A body of plain data."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)


def encoded(content: Any) -> bytes:
    """What a client sent, as JSON again.

    Raises RecursionError, which is answered with a 400, where it is nested so deep that it can be read but not written.
    """
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError as error:
        raise RecursionError(str(error)) from error


class JSONRequest(Request):
    """A request whose JSON is read strictly."""

    async def json(self) -> Any:
        """The body's data. Raises json.JSONDecodeError."""
        content = await self.body()
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            if b"NaN" in content or b"Infinity" in content:
                error.msg += " (NaN and Infinity are no JSON; send finite numbers)"
            error.doc = ""  # the whole body, which nobody reads
            raise


class JSONRoute(APIRoute):
    """A route whose handler gets a `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See fastapi."""
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return with_json
