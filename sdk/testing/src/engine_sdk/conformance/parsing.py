"""What the suites of parsers share: how texts are cut into pieces, and what reading them costs, counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.interfaces.tool_parser import FunctionTool

TOOLS = (
    FunctionTool(
        name="get_weather",
        description="Get the weather",
        parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    ),
    FunctionTool(name="now"),
    FunctionTool(
        name="save",
        parameters={
            "type": "object",
            "properties": {"rows": {"type": "array"}, "options": {"type": "object"}, "note": {"type": "string"}},
        },
    ),
)
"""What the requests of the suites offer."""

PER_CHARACTER = 150
"""Operations that one character may cost, in pieces of sixteen."""


def pieces(text: str, size: int) -> list[str]:
    """The text in pieces of this size; one empty piece of an empty text."""
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


def cuts(text: str) -> Iterator[list[str]]:
    """The text in single characters, and in two pieces at every place."""
    yield pieces(text, 1)
    for k in range(len(text) + 1):
        yield [text[:k], text[k:]]


def operations(work: Callable[[], object], keeps: object = None) -> int:
    """What it costs: lines of Python; characters of the texts whose methods, or in whose functions patterns, are
    called; and the texts that the object `keeps`, each time that another stands in one of its places.

    Seconds say little on a busy machine; this is the same each time.
    """
    count = 0
    kept: dict[str, int] = {}

    def of_line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
        elif event == "call":
            count += _grown(keeps, kept)
        return of_line

    def of_call(frame: Any, event: str, function: Any) -> None:
        nonlocal count
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            if isinstance(owner, str):
                count += len(owner)
            elif type(owner).__name__ == "Pattern":
                count += max((len(value) for value in frame.f_locals.values() if isinstance(value, str)), default=0)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(of_line)
    sys.setprofile(of_call)
    try:
        work()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def _grown(keeper: object, kept: dict[str, int]) -> int:
    """Characters of the texts among an object's attributes that are others than last time: they had to be made."""
    cost = 0
    attributes: Mapping[str, Any] = getattr(keeper, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, str) and kept.get(name) != id(value):
            kept[name] = id(value)
            cost += len(value)
    return cost


def read_at_cost(stream: Any, texts: Sequence[str]) -> int:
    """Push the texts into a stream and finish it; the operations that it takes."""

    def work() -> None:
        for text in texts:
            stream.push(text)
        stream.finish()

    return operations(work, stream)
