"""Calls as Qwen's models write them: Qwen3-Coder's tags for each parameter (the chat template in its repository), and
the JSON between `<tool_call>` tags of Qwen 2.5 and 3."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, FunctionTool, ToolStream
from engine_kit.call_object import CallObject
from engine_kit.json_stream import JsonStream, escaped
from engine_kit.tool_text import ToolText, begun, literal, skip
from engine_parsers.tool_parsers.hermes import BEGIN, END, hermes_form

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class QwenParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return QwenText(tools)

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        return hermes_form(tools)


class QwenText(ToolText):
    """One answer. Values of parameters that are strings by the tool's schema are told as they come; others when they
    have ended, as the JSON that they are."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        super().__init__((BEGIN, FUNCTION))
        self._schemas = {tool.name: tool.parameters.get("properties") for tool in tools}
        self._seen: set[str] = set()
        self._function = ""
        self._value: list[str] | None = None  # of a parameter that is no string

    def begin(self, marker: str) -> None:
        if marker == FUNCTION:
            self.read_name(">", self.named)
        else:
            self.state = self.in_call

    def in_call(self, text: str, position: int) -> int:
        """The state after <tool_call>."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (FUNCTION, "{"))
        if found is None:
            return self.give_up(text, position, position)
        if found == "{":
            self.read_object(CallObject(), self.closing)
            return position
        if found:
            self.read_name(">", self.named)
        return position + len(found)

    def named(self, text: str, position: int) -> int:
        """The state in which the function's name is known."""
        self._function = self.name.strip()
        self._seen = set()
        if not self._function:
            return self.give_up(text, position, position)
        self.announce(self._function)
        self.arguments("{")
        self.state = self.between
        return position

    def between(self, text: str, position: int) -> int:
        """The state before and after parameters."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (PARAMETER, FUNCTION_END))
        if found is None:
            return self.give_up(text, position, position)
        if found == PARAMETER:
            self.read_name(">", self.parameter)
        elif found:
            self.arguments("}")
            self.complete()
            self.state = self.closing
        return position + len(found)

    def closing(self, text: str, position: int) -> int:
        """The state after a call."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, (END,))
        if found is None:
            return self.give_up(text, position, position)
        if found:
            self.leave()
        return position + len(found)

    # -- values ------------------------------------------------------------------------------------------------------
    def parameter(self, text: str, position: int) -> int:
        """The state in which a parameter's name is known."""
        key = self.name.strip()
        if key in self._seen:
            return self.give_up(text, position, position, f"{PARAMETER}{self.name}>")
        comma = ", " if self._seen else ""
        self._seen.add(key)
        schemas = self._schemas.get(self._function)
        is_text = _is_text(schemas.get(key) if isinstance(schemas, Mapping) else None)
        self._value = None if is_text else []
        self.arguments(f'{comma}"{escaped(key)}": ' + ('"' if is_text else ""))
        self.state = self.first_of_value
        return position

    def first_of_value(self, text: str, position: int) -> int:
        """The state in which a value begins: the line break before it is none of it."""
        self.state = self.in_value
        return position + (text[position] == "\n")

    def in_value(self, text: str, position: int) -> int:
        """The state in a value: up to its end tag, and the line break before that."""
        end = text.find(PARAMETER_END, position)
        if end < 0:
            after = len(text) - begun(text, position, ("\n" + PARAMETER_END, PARAMETER_END))
            self._take(text[position:after])
            return after
        self._take(text[position : end - (end > position and text[end - 1] == "\n")])
        if self._value is None:
            self.arguments('"')
        else:
            self.arguments(_as_json(self._value))
        self._value = None
        self.state = self.between
        return end + len(PARAMETER_END)

    def _take(self, text: str) -> None:
        if self._value is None:
            self.arguments(escaped(text))
        else:
            self._value.append(text)

    def untold(self) -> str:
        if self._value is not None:
            return "".join(self._value)
        return PARAMETER + super().untold() if self.state == self._in_name else ""


def _is_text(schema: Any) -> bool:
    """Whether a value of this schema is a string whatever it looks like. What has no type is: nothing tells more."""
    if not isinstance(schema, Mapping):
        return True
    if "type" in schema:
        return bool(schema["type"] == "string")
    if isinstance(choices := schema.get("enum"), Sequence):
        return all(isinstance(choice, str) for choice in choices)
    return not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "const", "properties", "items"}


def _as_json(pieces: Sequence[str]) -> str:
    """A value as JSON: itself where it is some, else a string."""
    value = "".join(pieces)
    if value.strip() in _PYTHON:
        return _PYTHON[value.strip()]
    stream = JsonStream()
    for piece in (*pieces, " "):  # a number ends with what follows it
        position = 0 if stream.done else stream.feed(piece, 0)
        if stream.failed or (stream.done and piece[position:].strip()):
            break
    else:
        if stream.done:
            return stream.take()
    return json.dumps(value, ensure_ascii=False)
