"""One completion on its way to a chat message: thoughts, content and calls told apart, whole or as they come."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from engine.interfaces.reasoning_parser import ReasoningDelta, ReasoningStream
from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta, ToolEvent, ToolStream, whole


class ChatChoice:
    """Reads one completion.

    Args:
        reasoning: divides thoughts from the answer; None: there are no thoughts.
        tools: finds calls in the answer; None: there are no calls.
        parallel: False: of several calls only the first is told, the others are left out.
    """

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, parallel: bool) -> None:
        self._reasoning, self._tools, self._parallel = reasoning, tools, parallel
        self._complete = 0
        self._broken = False

    def message(self, text: str) -> dict[str, Any]:
        """The message of a whole text."""
        thoughts, events = self._read(text, finished=True)
        content, calls = whole(events)
        self._complete = len(calls)
        made: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if self._reasoning is not None:
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
        thoughts, events = self._read(text, finished)
        delta: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
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

    def _read(self, text: str, finished: bool) -> tuple[str, list[ToolEvent]]:
        """(thoughts, what the tool parser told of the answer)."""
        parts = [ReasoningDelta(content=text)] if self._reasoning is None else [self._reasoning.push(text)]
        if finished and self._reasoning is not None:
            parts.append(self._reasoning.finish())
        answer = "".join(part.content for part in parts)
        events: list[ToolEvent] = [answer] if answer else []
        if self._tools is not None:
            events = list(self._allowed(self._tools.push(answer)))
            if finished:
                events += self._allowed(self._tools.finish())
        return "".join(part.reasoning for part in parts), events

    def _allowed(self, events: Iterable[ToolEvent]) -> Iterable[ToolEvent]:
        if self._parallel:
            return events
        return [event for event in events if not isinstance(event, ToolCallDelta) or event.call == 0]


def new_id() -> str:
    """A call's id, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"
