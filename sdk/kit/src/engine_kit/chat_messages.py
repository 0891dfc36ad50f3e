"""What clients send of a conversation, as every chat template can read it: for `render_chat` of tokenizer drivers."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError, shown

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "template"})
"""What a template sees under these names is made from the request."""


def text_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages, with text for lists of text parts, and with the arguments of calls as objects. Copies.

    Raises InvalidRequestError: these are no messages, or they hold more than text.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"chat with messages={shown(messages)}",
            "that is no list of messages",
            'pass [{"role": "user", "content": "..."}]',
        )
    return [_text_message(message) for message in messages]


def template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy. Raises InvalidRequestError for a variable that nobody may set."""
    if taken := sorted(RESERVED.intersection(variables or ())):
        raise InvalidRequestError(
            f"chat with the template variable {taken[0]!r}",
            f"what the template sees as {taken[0]!r} is made from the request",
            "leave it out of chat_template_kwargs",
        )
    return dict(variables or {})


def _text_message(message: Any) -> dict[str, Any]:
    """A message whose content, if it is a list of text parts, has become one text: what every template can read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"chat with the message {reprlib.repr(message)}",
            "it has no role",
            'pass {"role": "user", "content": "..."}',
        )
    if message.get("tool_calls") is not None:
        message = {**message, "tool_calls": read_calls(message["tool_calls"])}
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    texts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"chat with a content part of type {kind!r}", "this engine reads text only", "send text parts"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """OpenAI's `tool_calls` of an earlier turn, the arguments of each as an object: clients send text, templates write
    JSON of an object. Text that is none stays text, as the model wrote it.

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
