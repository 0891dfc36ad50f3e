"""What a body says of tools: taken, or refused by the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest

from engine_server.conversation.tools import MAX_SCHEMA_DEPTH, ToolRequest, tool_request
from engine_server.errors import APIError


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_defaults() -> None:
    assert tool_request(None, None, None) == ToolRequest()
    assert tool_request(None, "none", None).choice == "none"
    made = tool_request([tool(description="d", parameters={"type": "object"}), tool("g")], None, None)
    assert (made.choice, made.parallel, [t.name for t in made.tools]) == ("auto", True, ["f", "g"])
    assert not made.tools[0].strict and made.given[0] == tool(description="d", parameters={"type": "object"})


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_choices(choice: str) -> None:
    assert tool_request([tool()], choice, False).choice == choice


def test_a_named_choice() -> None:
    made = tool_request([tool(), tool("g")], {"type": "function", "function": {"name": "g"}}, None)
    assert (made.choice, made.name, [t.name for t in made.callable]) == ("named", "g", ["g"])


NAMED = {"type": "function", "function": {"name": "ff"}}
BAD = [
    ([], None, None, "tools", "is empty"),
    (None, "required", None, "tool_choice", "there are no tools"),
    (None, NAMED, None, "tool_choice", "there are no tools"),
    (None, None, True, "parallel_tool_calls", "only allowed with tools"),
    ([tool()], "any", None, "tool_choice", '"required"'),
    ([tool()], {"type": "function"}, None, "tool_choice", '"required"'),
    ([tool()], {"type": "allowed_tools"}, None, "tool_choice", '"required"'),
    ([tool("f1"), tool("fg")], NAMED, None, "tool_choice", "not among the tools"),
    ([tool()], {**NAMED, "function": {"name": "f", "x": 1}}, None, "tool_choice", "'x'"),
    ([tool(), tool()], None, None, "tools", "tools.1.function.name"),
    ([{"type": "custom"}], None, None, "tools", "tools.0.type"),
    ([{"type": "function"}], None, None, "tools", "tools.0.function"),
    ([tool(""), tool()], None, None, "tools", "tools.0.function.name"),
    ([tool("a b")], None, None, "tools", "tools.0.function.name"),
    ([tool("f" * 129)], None, None, "tools", "tools.0.function.name"),
    ([tool(7)], None, None, "tools", "tools.0.function.name"),
    ([tool(description=7)], None, None, "tools", "tools.0.function.description"),
    ([tool(strict="yes")], None, None, "tools", "tools.0.function.strict"),
    ([tool(returns={})], None, None, "tools", "tools.0.function.returns"),
    ([{**tool(), "x": 1}], None, None, "tools", "tools.0.x"),
    ([tool(parameters=[])], None, None, "tools", "tools.0.function.parameters"),
    ([tool(parameters={"type": "array"})], None, None, "tools", "tools.0.function.parameters.type"),
    ([tool(parameters={"properties": []})], None, None, "tools", "parameters.properties"),
    ([tool(parameters={"properties": {"a": 7}})], None, None, "tools", "parameters.properties.a"),
    ([tool(parameters={"properties": {"a": {"type": "objct"}}})], None, None, "tools", "properties.a.type"),
    ([tool(parameters={"required": "a"})], None, None, "tools", "parameters.required"),
    ([tool(parameters={"properties": {"a": {"enum": []}}})], None, None, "tools", "properties.a.enum"),
    ([tool(parameters={"anyOf": {}})], None, None, "tools", "parameters.anyOf"),
    ([tool(parameters={"$defs": {"a": []}})], None, None, "tools", "parameters.$defs.a"),
    ([tool(parameters=nested(MAX_SCHEMA_DEPTH + 1))], None, None, "tools", "deep"),
    ([tool(f"f{i}") for i in range(1025)], None, None, "tools", "1025"),
]


@pytest.mark.parametrize(("tools", "choice", "parallel", "param", "said"), BAD)
def test_refused_by_name(tools: Any, choice: Any, parallel: Any, param: str, said: str) -> None:
    with pytest.raises(APIError) as caught:
        tool_request(tools, choice, parallel)
    assert caught.value.status == 400 and caught.value.param == param and said in str(caught.value)
