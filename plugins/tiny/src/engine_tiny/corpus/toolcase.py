"""One request that one tool serves, in the OpenAI form of tools and calls."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from engine_tiny.corpus import words
from engine_tiny.corpus.base import Message, Split, pick

Tool = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request that one tool serves."""

    tool: Tool
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str
    family: str
    rivals: list[Tool] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def make_tool(name: str, description: str, parameters: dict[str, str]) -> Tool:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call(case: Case) -> Message:
    function = {"name": case.name, "arguments": case.arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def wordy(description: str, rng: random.Random, split: Split) -> str:
    """People write more into a description than a model needs."""
    if rng.random() < 0.85:
        return description
    extra = pick(rng, (
        f"Returns a {words.nonsense(rng, split)}.", "Call it once.", f"Works with {words.phrase(rng, split)}.",
        "Only for users.", f"See {words.proper(rng, split)} for more.", "The result is JSON.",
    ))  # fmt: skip
    return f"{description} {extra}".strip()
