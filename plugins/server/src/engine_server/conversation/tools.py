"""The tools of a chat request: what it offers, and what the model must or may do with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal

from engine.interfaces.tool_parser import FunctionTool
from engine.plugin.hints import did_you_mean
from engine_server.conversation.reading import bad, unsupported

MAX_TOOLS = 1024
"""The most tools that a request may offer."""
MAX_SCHEMA_DEPTH = 64
"""How deep the schemas of parameters may be nested."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_SCHEMAS = frozenset({"items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPPINGS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})

Choice = Literal["none", "auto", "required", "named"]
Tools = tuple[FunctionTool, ...]


@dataclass(frozen=True)
class ToolRequest:
    """What a request says of tools.

    Args:
        tools: as the engine reads them.
        given: the same as the client sent them, for the chat template.
        choice: whether the model calls any; "named": the one that `name` says.
        parallel: whether it may call several at once.
    """

    tools: tuple[FunctionTool, ...] = ()
    given: tuple[dict[str, Any], ...] = ()
    choice: Choice = "none"
    name: str = ""
    parallel: bool = True

    @property
    def callable(self) -> tuple[FunctionTool, ...]:
        """Those that the model may call."""
        return tuple(tool for tool in self.tools if not self.name or tool.name == self.name)


def tool_request(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolRequest:
    """Check what a body says. Raises APIError, a 400 that names the parameter."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", f"is {short(choice)}, and there are no tools", "send tools")
        if parallel is not None:
            raise bad("parallel_tool_calls", "is only allowed with tools", "send tools, or leave it out")
        if tools is not None:
            raise bad("tools", "is empty", "send at least one, or leave it out")
        return ToolRequest()
    read = read_tools(tools, _tool, ".function")
    kind, name = _choice(choice, read)
    return ToolRequest(read, tuple(dict(tool) for tool in tools), kind, name, parallel is not False)


def read_tools(
    tools: Sequence[Mapping[str, Any]], read: Callable[[int, Mapping[str, Any]], FunctionTool], below: str = ""
) -> Tools:
    """Read each (`read` gets its place, too): not more than may be offered, each with a name of its own, which stands
    `below` the tool."""
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"holds {len(tools)} tools", f"send up to {MAX_TOOLS}")
    found = tuple(read(i, tool) for i, tool in enumerate(tools))
    seen: set[str] = set()
    for i, tool in enumerate(found):
        if tool.name in seen:
            raise bad(f"tools.{i}{below}.name", f"is {tool.name!r} once more", "give every tool a name of its own")
        seen.add(tool.name)
    return found


def check_chosen(name: str, tools: Tools) -> str:
    """That the name which `tool_choice` gives is a tool's."""
    names = [tool.name for tool in tools]
    if name not in names:
        near = did_you_mean(name[:64], names) or f"the tools are {', '.join(names[:20])}"
        raise bad("tool_choice", f"names the function {short(name)}, which is not among the tools", near)
    return name


def chat_form(tools: Tools) -> tuple[dict[str, Any], ...]:
    """Tools in the form that chat templates take."""
    given = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}
        if tool.description:
            function["description"] = tool.description
        given.append({"type": "function", "function": function})
    return tuple(given)


def _choice(choice: Any, tools: Tools) -> tuple[Choice, str]:
    if choice is None:
        return "auto", ""
    if choice in ("none", "auto", "required"):
        return choice, ""
    hint = 'send "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad("tool_choice", f"is {short(choice)}", hint)
    for unknown in [*(choice.keys() - {"type", "function"}), *(function.keys() - {"name"})]:
        raise bad("tool_choice", f"has the key {short(unknown)}, which is not supported", hint)
    return "named", check_chosen(function["name"], tools)


def _tool(i: int, tool: Mapping[str, Any]) -> FunctionTool:
    where = f"tools.{i}"
    if tool.get("type") != "function":
        raise bad(f"{where}.type", f"is {short(tool.get('type'))}", 'send "function": there are no other tools here')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad(f"{where}.function", f"is {short(function)}", "send an object with a name and parameters")
    for unknown in tool.keys() - {"type", "function"}:
        raise unsupported(f"{where}.{unknown}")
    return function_tool(function, f"{where}.function")


def function_tool(function: Mapping[str, Any], where: str, schema: str = "parameters") -> FunctionTool:
    """Read name, description, `strict`, and the arguments' schema, which is called `schema`, of an object that holds
    nothing else; `where` it stands is for errors."""
    for unknown in function.keys() - {"name", "description", schema, "strict"}:
        raise unsupported(f"{where}.{unknown}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(f"{where}.name", f"is {short(name)}", "send up to 128 letters, digits and any of _ - . : /")
    if not isinstance(description, str | None):
        raise bad(f"{where}.description", f"is {short(description)}", "send a text")
    strict, parameters = function.get("strict"), function.get(schema)
    if not isinstance(strict, bool | None):
        raise bad(f"{where}.strict", f"is {short(strict)}", "send true or false")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise bad(f"{where}.{schema}", f"is {short(parameters)}", "send a JSON schema of an object")
    if parameters.get("type", "object") != "object":
        kind = short(parameters["type"])
        raise bad(f"{where}.{schema}.type", f"is {kind}", 'send "object": arguments are one')
    _check_schema(parameters, f"{where}.{schema}")
    return FunctionTool(name=name, description=description or "", parameters=parameters, strict=strict is True)


def _check_schema(schema: Any, where: str) -> None:
    """That it has the form of a JSON schema; whether a grammar can enforce it is the grammar's to say."""
    pending: list[tuple[Any, str, int]] = [(schema, where, 0)]
    while pending:
        node, place, depth = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise bad(place, f"is {short(node)}", "send a JSON schema: an object, true or false")
        if depth > MAX_SCHEMA_DEPTH:
            raise bad(where, f"is nested more than {MAX_SCHEMA_DEPTH} deep", "name parts of it under $defs")
        for key, part in node.items():
            if key == "type":
                for kind in part if isinstance(part, list) else [part]:
                    if not isinstance(kind, str) or kind not in _TYPES:
                        raise bad(f"{place}.type", f"is {short(kind)}", f"send one of {', '.join(sorted(_TYPES))}")
            elif key == "required":
                if not isinstance(part, list) or not all(isinstance(name, str) for name in part):
                    raise bad(f"{place}.required", f"is {short(part)}", "send a list of names")
            elif key == "enum":
                if not (isinstance(part, list) and part):
                    raise bad(f"{place}.enum", f"is {short(part)}", "send a list of values")
            elif key in _SCHEMAS:
                pending.append((part, f"{place}.{key}", depth + 1))
            elif key in _LISTS:
                if not isinstance(part, list):
                    raise bad(f"{place}.{key}", f"is {short(part)}", "send a list of schemas")
                pending += [(one, f"{place}.{key}.{i}", depth + 1) for i, one in enumerate(part)]
            elif key in _MAPPINGS:
                if not isinstance(part, dict):
                    raise bad(f"{place}.{key}", f"is {short(part)}", "send an object of names and schemas")
                pending += [(one, f"{place}.{key}.{name}"[:200], depth + 1) for name, one in part.items()]
