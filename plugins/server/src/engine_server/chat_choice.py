"""One completion on its way to a chat message: thoughts, content and calls told apart, whole or as they come."""

from __future__ import annotations

from typing import Any

from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta, whole
from engine_server.completion_reader import CompletionReader, new_id


class ChatChoice:
    """Makes a chat message of what `reader` tells of one completion; `with_thoughts` False leaves thoughts out."""

    def __init__(self, reader: CompletionReader, with_thoughts: bool = True) -> None:
        self._reader, self._with_thoughts = reader, with_thoughts
        self._complete = 0
        self._broken = False

    def message(self, text: str) -> dict[str, Any]:
        """The message of a whole text."""
        thoughts, events = self._reader.push(text, finished=True)
        content, calls = whole(events)
        self._complete = len(calls)
        made: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if self._reader.has_thoughts and self._with_thoughts:
            made["reasoning_content"] = thoughts or None
        if calls:
            made["tool_calls"] = [
                {
                    "id": call.call_id or new_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return made

    def delta(self, text: str, finished: bool) -> dict[str, Any]:
        """What more of the text adds to the message; empty where that is nothing yet. Call it once with `finished`."""
        thoughts, events = self._reader.push(text, finished)
        delta: dict[str, Any] = {"reasoning_content": thoughts} if thoughts and self._with_thoughts else {}
        content: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, str):
                content.append(event)
            elif isinstance(event, BrokenCall):
                self._broken = True
                content.append(event.untold)
            else:
                self._add(calls, event)
        if any(content):
            delta["content"] = "".join(content)
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for how it ended: calls are the reason where there are some, and all of them are whole."""
        return "tool_calls" if reason == "stop" and self._complete and not self._broken else reason

    def _add(self, calls: dict[int, dict[str, Any]], event: ToolCallDelta) -> None:
        """An event of a call, joined with those of the same call in this delta: clients take one entry for each."""
        self._complete += event.complete
        if event.name:
            calls[event.call] = {
                "index": event.call,
                "id": event.call_id or new_id(),
                "type": "function",
                "function": {"name": event.name, "arguments": event.arguments},
            }
        elif event.arguments:
            entry = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.arguments
