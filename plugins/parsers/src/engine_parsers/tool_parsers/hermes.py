"""Calls as Hermes and Qwen 2.5 and 3 write them (NousResearch/Hermes-Function-Calling): JSON between two tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, CallTag, FunctionTool, ToolStream
from engine_kit.call_object import CallObject
from engine_kit.tool_text import ToolText, literal, skip

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return HermesText()

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        return hermes_form(tools)


def hermes_form(tools: Sequence[FunctionTool]) -> CallForm:
    """The form for grammars. The spaces are those of json.dumps, in which models have learnt it."""
    tags = tuple(
        CallTag(tool.name, f'{BEGIN}{{"name": {json.dumps(tool.name)}, "arguments": ', f"}}{END}") for tool in tools
    )
    return CallForm(tags, separator="\n", trigger=BEGIN)


class HermesText(ToolText):
    """One answer."""

    def __init__(self) -> None:
        super().__init__((BEGIN,))

    def begin(self, marker: str) -> None:
        self.read_object(CallObject(), self.closing)

    def closing(self, text: str, position: int) -> int:
        """The state after the object."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (END,))
        if found is None:
            return self.give_up(text, position, position)
        if found:
            self.leave()
        return position + len(found)
