"""Reads one completion: thoughts, content and calls told apart, whole or as they come."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple

from engine.interfaces.reasoning_parser import ReasoningDelta, ReasoningStream
from engine.interfaces.tool_parser import ToolCallDelta, ToolEvent, ToolStream


class Reading(NamedTuple):
    """What more of a text adds: to the thoughts, then to the answer, as the tool parser tells it."""

    thoughts: str
    events: list[ToolEvent]


class CompletionReader:
    """Reads one completion.

    Args:
        reasoning: divides thoughts from the answer; None: there are no thoughts.
        tools: finds calls in the answer; None: there are no calls.
        parallel: False: of several calls only the first is told, the others are left out.
    """

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, parallel: bool = True) -> None:
        self._reasoning, self._tools, self._parallel = reasoning, tools, parallel

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are told apart."""
        return self._reasoning is not None

    def push(self, text: str, finished: bool) -> Reading:
        """Read more of the text. Call it once with `finished`."""
        parts = [ReasoningDelta(content=text)] if self._reasoning is None else [self._reasoning.push(text)]
        if finished and self._reasoning is not None:
            parts.append(self._reasoning.finish())
        answer = "".join(part.content for part in parts)
        events: list[ToolEvent] = [answer] if answer else []
        if self._tools is not None:
            events = list(self._allowed(self._tools.push(answer)))
            if finished:
                events += self._allowed(self._tools.finish())
        return Reading("".join(part.reasoning for part in parts), events)

    def _allowed(self, events: Iterable[ToolEvent]) -> Iterable[ToolEvent]:
        if self._parallel:
            return events
        return [event for event in events if not isinstance(event, ToolCallDelta) or event.call == 0]


def new_id(prefix: str = "call_") -> str:
    """An id for a part of an answer, e.g. a call's, in OpenAI's form."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"
