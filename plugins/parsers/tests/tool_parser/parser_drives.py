"""Drives parsers, and tells what they told in a form that does not depend on how the text was cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import BrokenCall, FunctionTool, ToolCallDelta, ToolEvent, ToolParser
from engine.plugin import Registry, load_body
from engine.types.model import CheckpointFiles, ModelDescription

TOOLS = [
    FunctionTool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        },
    ),
    FunctionTool(name="now"),
    FunctionTool(name="save", parameters={"type": "object", "properties": {"rows": {"type": "array"}}}),
]


def parser(point: str, name: str) -> Any:
    """An installed driver's body."""
    registry = Registry.discover()
    candidate = registry.find(point, name)
    model = ModelDescription(
        architecture="Test", dtype="float32", vocab_size=8, hidden_size=8, num_layers=1, num_q_heads=1,
        max_model_len=8, kv_specs=(),
    )  # fmt: skip
    files = CheckpointFiles(name="test", folder="", weights=(), config={})
    body = load_body(registry.card(candidate), candidate=candidate)
    return body(FrontContext(folder="", files=files, model=model))


def events(body: ToolParser, pieces: Iterable[str], tools: Sequence[FunctionTool] = TOOLS) -> list[ToolEvent]:
    """What is told of a text in these pieces; neighbours of one kind joined, ids left out."""
    stream = body.stream(tools)
    told: list[ToolEvent] = [event for piece in pieces for event in stream.push(piece)]
    return joined([*told, *stream.finish()])


def joined(told: Iterable[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one; ids left out."""
    found: list[ToolEvent] = []
    for event in told:
        last = found[-1] if found else None
        if isinstance(event, str) and isinstance(last, str):
            found[-1] = last + event
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.call == event.call:
            assert not event.name and not last.complete, "a call has one name, and nothing after its end"
            found[-1] = last._replace(arguments=last.arguments + event.arguments, complete=event.complete)
        elif isinstance(event, ToolCallDelta):
            assert event.name, "the first news of a call is its name"
            found.append(event._replace(call_id=""))
        else:
            found.append(event)
    return found


def shown_at_once(told: Iterable[ToolEvent]) -> tuple[str, list[tuple[str, str, bool]]]:
    """What a client sees that was told of calls as they came: (content, [(name, arguments, complete)])."""
    content, calls = "", []
    for event in told:
        if isinstance(event, str):
            content += event
        elif isinstance(event, BrokenCall):
            content += event.untold
        else:
            calls.append((event.name, event.arguments, event.complete))
    return content, calls
