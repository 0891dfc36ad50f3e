"""JSON by orjson: requests and answers. Strict: no NaN, no lone surrogates, and not nested more than 1024 deep."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

LARGE = 64 * 1024
"""Bytes of a body from which it is looked through and read in a thread: below, that takes two milliseconds at most."""


def dumps(content: Any) -> bytes:
    """Plain data and `Answer`s as JSON."""
    return orjson.dumps(content, default=_set_fields)


def _set_fields(answer: BaseModel) -> dict[str, Any]:
    set_ = answer.model_fields_set
    return {name: value for name, value in vars(answer).items() if name in set_}


def loads(content: bytes) -> Any:
    """The data of a text of JSON. Raises json.JSONDecodeError, with a hint where that helps."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if b"NaN" in content or b"Infinity" in content:
            error.msg += " (NaN and Infinity are no JSON; send finite numbers)"
        error.doc = ""  # the whole body, which nobody reads
        raise


def encoded(content: Any) -> bytes:
    """What a client sent, as JSON again.

    Raises RecursionError, which is answered with a 400, where it is nested so deep that it can be read but not written.
    """
    try:
        return orjson.dumps(content)
    except orjson.JSONEncodeError as error:
        raise RecursionError(str(error)) from error


class JSON(Response):
    """A body of plain data, or an `Answer`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dumps(content)


class JSONRequest(Request):
    """A request whose JSON is read strictly, and once; what is large, in a thread."""

    _data: Any = None

    async def json(self) -> Any:
        """The body's data. Raises json.JSONDecodeError."""
        if self._data is None:
            content = await self.body()
            self._data = loads(content) if len(content) < LARGE else await asyncio.to_thread(loads, content)
        return self._data
