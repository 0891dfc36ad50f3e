"""Calls as bare JSON: what a model writes that a JSON schema makes call tools, whatever its own form is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types.tools import FunctionTool
from engine_kit.call_object import CallObject
from engine_kit.tool_text import ToolText, skip


def schema_of(tool: FunctionTool) -> dict[str, Any]:
    """The schema of a tool's arguments; a tool without parameters takes an empty object."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def list_schema(tools: Sequence[FunctionTool], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, at least one: the form that vLLM uses for required calls. What schemas define
    under `$defs` moves to the whole's."""
    defined: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = schema_of(tool)
        for key in ("$defs", "definitions"):
            defined.setdefault(key, {}).update(parameters.pop(key, {}))
        properties = {"name": {"type": "string", "enum": [tool.name]}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "items": items, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    return schema | {key: value for key, value in defined.items() if value}


class ListedCalls(ToolText):
    """Reads `[{"name": ..., "parameters": {...}}, ...]`, a `ToolStream`."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        """The state before the list."""
        return self._expect(text, position, "[", self.in_list)

    def in_list(self, text: str, position: int) -> int:
        """The state before an object."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        self.read_object(CallObject(), self.after_object)
        return position

    def after_object(self, text: str, position: int) -> int:
        """The state after an object."""
        if text[position] == "]":
            self.leave()
            return position + 1
        return self._expect(text, position, ",", self.in_list)

    def _expect(self, text: str, position: int, character: str, then: Any) -> int:
        if (after := skip(text, position)) > position:
            return after
        if text[position] != character:
            return self.give_up(text, position, position)
        self.state = then
        return position + 1


class NamedCall(ToolText):
    """Reads the arguments of one call whose name is known, a `ToolStream`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.state = self.at_start
        self.attempt()

    def at_start(self, text: str, position: int) -> int:
        """The state before the arguments."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        self.announce(self._name)
        self.read_arguments(self.behind)
        return position

    def behind(self, text: str, position: int) -> int:
        """The state after the arguments."""
        self.leave()
        return position
