"""Calls as Llama 3.2, Llama 4 and others write them: the answer is a Python list of calls with keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, FunctionTool, ToolStream
from engine_kit.tool_text import ToolText, literal, skip
from engine_parsers.tool_parsers.python_arguments import PythonArguments

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class PythonicParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return PythonicText(tools)

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        return None  # the arguments are no JSON


class PythonicText(ToolText):
    """One answer. Without markers, a call is known by its place, the answer's beginning, and by an offered name."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self._python = PythonArguments()
        self._tagged = False
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        """The state in which the answer begins."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, ("[",) if self._tagged else ("[", PYTHON_START))
        if found is None:
            return self.give_up(text, position, position)
        if found == "[":
            self.state = self.before_name
        elif found:
            self._tagged = True
        return position + len(found)

    def before_name(self, text: str, position: int) -> int:
        """The state in which a call begins."""
        if (after := skip(text, position)) > position:
            return after
        if not (text[position].isalpha() or text[position] == "_"):
            return self.give_up(text, position, position)
        self.read_name("(", self.named)
        return position

    def named(self, text: str, position: int) -> int:
        """The state behind the opening parenthesis."""
        name = self.name.strip()
        if not _NAME.fullmatch(name) or name not in self._names:
            return self.give_up(text, position, position)
        self.announce(name)
        self._python = PythonArguments()
        self.state = self.in_arguments
        return position

    def in_arguments(self, text: str, position: int) -> int:
        """The state in the arguments."""
        after = self._python.feed(text, position)
        self.arguments(self._python.take())
        if self._python.failed:
            return self.give_up(text, position, after)
        if self._python.done:
            self.complete()
            self.state = self.between
        return after

    def between(self, text: str, position: int) -> int:
        """The state after a call."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] == ",":
            self.state = self.before_name
        elif text[position] == "]":
            self.state = self.after_list
            self._taken = []
            return position + 1
        else:
            return self.give_up(text, position, position)
        return position + 1

    def after_list(self, text: str, position: int) -> int:
        """The state behind the list: nothing but its end tag belongs to it."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (PYTHON_END,)) if self._tagged else None
        if found is None:
            return self.give_up(text, position, position)
        if found:
            self.leave()
        return position + len(found)
