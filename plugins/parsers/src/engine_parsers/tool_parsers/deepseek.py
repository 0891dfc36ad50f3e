"""Calls as DeepSeek V3, R1 and V3.1 write them (the chat templates in their repositories)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, CallTag, FunctionTool, ToolStream
from engine_kit.tool_text import ToolText, literal, skip

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class DeepSeekParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return DeepSeekText()

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        tags = tuple(CallTag(tool.name, f"{CALL_BEGIN}{tool.name}{SEPARATOR}", CALL_END) for tool in tools)
        return CallForm(tags, before=CALLS_BEGIN, after=CALLS_END)


class DeepSeekText(ToolText):
    """One answer. V3: `CALL_BEGIN function SEPARATOR name \\n ```json {...} ``` CALL_END`; V3.1: `CALL_BEGIN name
    SEPARATOR {...} CALL_END`; both between CALLS_BEGIN and CALLS_END."""

    def __init__(self) -> None:
        super().__init__((CALLS_BEGIN, CALL_BEGIN))

    def begin(self, marker: str) -> None:
        if marker == CALL_BEGIN:
            self.read_name(SEPARATOR, self.after_separator)
        else:
            self.state = self.between

    def between(self, text: str, position: int) -> int:
        """The state before and after calls."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (CALL_BEGIN, CALLS_END))
        if found is None:
            return self.give_up(text, position, position)
        if found == CALL_BEGIN:
            self._after_call = False
            self.read_name(SEPARATOR, self.after_separator)
        elif found:
            self.leave()
        return position + len(found)

    def after_separator(self, text: str, position: int) -> int:
        """The state in which V3 names the function and V3.1 begins the arguments."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] == "{":
            return self._begin_arguments(text, position)
        self.read_name("\n", self.before_fence)
        return position

    def before_fence(self, text: str, position: int) -> int:
        """The state between the name and the arguments."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (FENCE + "json", "{"))
        if found is None:
            return self.give_up(text, position, position)
        if found == "{":
            return self._begin_arguments(text, position)
        if found:
            self.state = self.before_arguments
        return position + len(found)

    def before_arguments(self, text: str, position: int) -> int:
        """The state behind the fence."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        return self._begin_arguments(text, position)

    def _begin_arguments(self, text: str, position: int) -> int:
        name = self.name.strip()
        if not name:
            return self.give_up(text, position, position)
        self.announce(name)
        self.read_arguments(self.closing)
        return position

    def closing(self, text: str, position: int) -> int:
        """The state after the arguments."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (FENCE, CALL_END))
        if found is None:
            return self.give_up(text, position, position)
        if found == CALL_END:
            self.state = self.between
            self._taken = []
        return position + len(found)
