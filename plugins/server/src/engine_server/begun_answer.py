"""An answer that the request itself begins: vLLM's `continue_final_message`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_server.errors import APIError

NAME = "continue_final_message"


def cut_last(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages without the last one, and its text: the beginning of the answer.

    Raises a 400 APIError where the last message is no text of the assistant, or stands alone.
    """
    last = messages[-1]
    if last.get("role") != "assistant":
        raise _refused("the last message is not the assistant's")
    if strange := [name for name in ("tool_calls", "reasoning_content", "reasoning") if last.get(name)]:
        raise _refused(f"the last message has {strange[0]}")
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise _refused("the last message's content is no text")
    if len(messages) == 1:
        raise _refused("no message stands before it")
    return messages[:-1], content


def _refused(found: str) -> APIError:
    return APIError(400, f"{NAME}: {found}; end messages with the assistant's own words, as a string", param=NAME)
