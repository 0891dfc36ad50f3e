"""The lines of a batch: plain text, or JSON with a prompt or messages and sampling parameters of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.plugin.hints import did_you_mean
from engine.types.errors import InvalidRequestError

Format = Literal["text", "jsonl"]

_CONTENT = ("prompt", "prompt_token_ids", "messages")
_NOT_FOR_FILES = frozenset({"detokenize"})
"""Without text there would be no result to write."""


@dataclass(frozen=True)
class Line:
    """One request of a batch.

    Attributes:
        number: of its line, from 1.
        identity: its "id", to be written with the result; None where it has none.
        prompt: a text or token ids; None for a conversation.
        messages: a conversation; None for a prompt.
        sampling: its own parameters, by their names in `SamplingParams`.
    """

    number: int
    identity: Any = None
    prompt: str | list[int] | None = None
    messages: list[Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def choose_format(path: str, text: str) -> Format:
    """What a file holds: JSON by its name (.jsonl, .ndjson), or where its first line is an object; else plain text."""
    if path.lower().endswith((".jsonl", ".ndjson")):
        return "jsonl"
    first = text.lstrip().split("\n", 1)[0].strip()
    try:
        return "jsonl" if isinstance(json.loads(first), dict) else "text"
    except ValueError:
        return "text"


def holds_objects(text: str) -> bool:
    """Whether any line is a JSON object."""
    for line in text.split("\n"):
        try:
            if isinstance(json.loads(line), dict):
                return True
        except ValueError:
            continue
    return False


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be read.

    Attributes:
        number: of the line, from 1.
        error: to be written in its result's place.
    """

    number: int
    error: InvalidRequestError


def parse_lines(text: str, form: Format) -> list[Line | BadLine]:
    """Every line that is not blank."""
    lines: list[Line | BadLine] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON text may hold other characters that end lines
        if not line.strip():
            continue
        if form == "text":
            lines.append(Line(number, prompt=line.removesuffix("\r")))
            continue
        try:
            lines.append(parse_json(line, number))
        except InvalidRequestError as error:
            lines.append(BadLine(number, error))
    return lines


def parse_json(text: str, number: int) -> Line:
    """One line of JSON.

    Raises:
        InvalidRequestError: it is no JSON object, has not just one of prompt, prompt_token_ids and messages, or a key
            that means nothing (with near matches).
    """
    asked = f"line {number}"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(asked, f"it is not valid JSON: {error}", "write one JSON object a line") from error
    if not isinstance(content, dict):
        found = f"it is a JSON {type(content).__name__}, not an object"
        raise InvalidRequestError(asked, found, 'write one object a line, e.g. {"prompt": "Hello"}')
    names = sampling_names()
    known = (*_CONTENT, "id", *names)
    for key in content:
        if key not in known:
            hint = did_you_mean(key, known) or f"the keys are: {', '.join(known)}"
            raise InvalidRequestError(asked, f"there is no key {key!r}", hint)
    given = [key for key in _CONTENT if content.get(key) is not None]
    if len(given) != 1:
        found = f"it has {' and '.join(given)}" if given else f"it has none of {', '.join(_CONTENT)}"
        raise InvalidRequestError(asked, found, "give just one of them")
    prompt, messages = content.get("prompt"), content.get("messages")
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidRequestError(asked, f"prompt={prompt!r:.80} is not a string", "write it in quotes")
    ids = content.get("prompt_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise InvalidRequestError(asked, f"prompt_token_ids={ids!r:.80} is not a list of integers")
    if messages is not None and not isinstance(messages, list):
        found = f"messages={messages!r:.80} is not a list"
        raise InvalidRequestError(asked, found, 'write [{"role": "user", "content": "Hello"}]')
    sampling = {key: value for key, value in content.items() if key in names}
    return Line(number, content.get("id"), prompt if prompt is not None else ids, messages, sampling)


def sampling_names() -> tuple[str, ...]:
    """The sampling parameters that a line may set."""
    from engine.types.params import SamplingParams

    return tuple(name for name in SamplingParams.__struct_fields__ if name not in _NOT_FOR_FILES)
