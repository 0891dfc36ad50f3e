"""Calls that an assistant's earlier message made, as chat templates want them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls`, the arguments of each as an object: clients send text, templates write JSON of an object.
    Text that is none stays text, as the model wrote it.

    Raises InvalidRequestError for what are no calls.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise _bad(calls, "that is no list")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(call, "it has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, Mapping):
        raise _bad(call, "its arguments are neither text nor an object")
    return {**call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return text
    return value if isinstance(value, dict) else text


def _bad(found: Any, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"chat with the tool call {reprlib.repr(found)}",
        why,
        'pass {"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}',
    )
