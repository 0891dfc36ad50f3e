"""JSON by orjson: requests and answers. Strict: no NaN, no lone surrogates, and not nested more than 1024 deep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

LARGE = 64 * 1024
"""Bytes of a body from which it is looked through and read in a thread: below, that takes two milliseconds at most."""
PARSED = "engine.json"
"""Where a request's scope holds its body's data, once it was read."""
_PIECE = 2**20


class Count(NamedTuple):
    """What a text of JSON makes when it is read.

    Args:
        objects: lists, objects and strings, names of fields among them.
        values: whatever lists and objects hold, and these themselves: at most one less than there are.
    """

    objects: int
    values: int


def count(content: bytes) -> Count:
    """What reading this would make, without making it: for what is no JSON, up to where that shows, at least as much.

    Reading keeps the interpreter until it is done, numpy does not.
    """
    opened = num_quotes = commas = 0
    inside, rest = 0, b""  # whether a string goes on, and a backslash that has lost its character
    for start in range(0, len(content), _PIECE):
        piece = (rest + content[start : start + _PIECE]).replace(rb"\\", b"")
        rest = piece[-1:] if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(rest).replace(rb"\"", b"")
        bytes_ = np.frombuffer(piece, np.uint8)
        quotes = (bytes_ == ord('"')).view(np.uint8)
        outside = np.bitwise_xor.accumulate(quotes, dtype=np.uint8) == inside
        opened += int(np.count_nonzero(outside & ((bytes_ == ord("[")) | (bytes_ == ord("{")))))
        commas += int(np.count_nonzero(outside & (bytes_ == ord(","))))
        num_quotes += int(np.count_nonzero(quotes))
        inside = num_quotes & 1
    return Count(opened + num_quotes // 2, opened + commas)


def loads(content: bytes) -> Any:
    """The data of a text of JSON. Raises json.JSONDecodeError, with a hint where that helps."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if b"NaN" in content or b"Infinity" in content:
            error.msg += " (NaN and Infinity are no JSON; send finite numbers)"
        error.doc = ""  # the whole body, which nobody reads
        raise


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
        if PARSED in self.scope:
            return self.scope[PARSED]
        content = await self.body()
        return loads(content) if len(content) < LARGE else await asyncio.to_thread(loads, content)


class JSONRoute(APIRoute):
    """A route whose handler gets a `JSONRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See fastapi."""
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(JSONRequest(request.scope, request.receive))

        return with_json
