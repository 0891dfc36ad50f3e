"""Calls as Llama 3.1 to 3.3 write them (Meta's prompt format): the answer is one JSON object, or several with `;`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, CallTag, FunctionTool, ToolStream
from engine_kit.call_object import CallObject
from engine_kit.tool_text import ToolText, literal, skip

PYTHON_TAG = "<|python_tag|>"
_OTHER_KEYS = ("type", "id")


class Llama3JsonParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return Llama3Text(tools)

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        tags = tuple(CallTag(tool.name, f'{{"name": {json.dumps(tool.name)}, "parameters": ', "}") for tool in tools)
        return CallForm(tags, separator="; ")


class Llama3Text(ToolText):
    """One answer. Without markers, a call is known by its place, the answer's beginning, and by an offered name."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        """The state in which the answer begins."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (PYTHON_TAG, "{"))
        if found is None:
            return self.give_up(text, position, position)
        if found == PYTHON_TAG:
            return position + len(found)
        if found:
            self._read_call()
        return position

    def _read_call(self) -> None:
        self.read_object(CallObject(self.accepts, _OTHER_KEYS, needs_arguments=True), self.between)

    def between(self, text: str, position: int) -> int:
        """The state after a call."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != ";":
            return self.give_up(text, position, position)
        self.state = self.after_separator
        return position + 1

    def after_separator(self, text: str, position: int) -> int:
        """The state in which another call may begin."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        self._read_call()
        return position

    def accepts(self, name: str) -> bool:
        return name in self._names
