"""Reads what lies deep in a request: JSON objects, field by field, of which what was not asked for is refused by name;
and the messages that Anthropic's blocks and OpenAI's items make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Any

from engine_server.errors import APIError


class JSONObject:
    """One object. A field whose value is null counts as absent.

    Args:
        value: what should be one.
        where: it stands, for errors, e.g. "messages.0".

    Attributes:
        left: the fields that have not been taken.

    Raises (here and from every method) APIError, a 400 that says where.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, Mapping):
            raise bad(where, f"is {short(value)}", "send an object")
        self.left = {name: field for name, field in value.items() if field is not None}

    def take(self, name: str) -> Any:
        """The field's value; None where it is absent."""
        return self.left.pop(name, None)

    def text(self, name: str) -> str:
        """A field that has to be there."""
        value = self.take(name)
        if not isinstance(value, str):
            found = "is missing" if value is None else f"is {short(value)}"
            raise bad(f"{self.where}.{name}", found, "send a text")
        return value

    def flag(self, name: str) -> bool | None:
        """A field that is true, false or absent."""
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise bad(f"{self.where}.{name}", f"is {short(value)}", "send true or false")
        return value

    def one_of(self, name: str, options: Sequence[str]) -> str:
        """A field that has to be there and to have one of these values."""
        value = self.take(name)
        if value not in options:
            found = "is missing" if value is None else f"is {short(value)}"
            raise bad(f"{self.where}.{name}", found, f"send {_either(options)}")
        return str(value)

    def end(self) -> None:
        """Refuse what is left."""
        for name in self.left:
            raise unsupported(f"{self.where}.{name}")


def bad(where: str, found: str, remedy: str) -> APIError:
    """A 400 about the field that stands there."""
    return APIError(400, f"{where} {found}; {remedy}", param=where.partition(".")[0])


def unsupported(where: str) -> APIError:
    """A 400 about a field that nobody asked for."""
    found = f"{where[:200]} is not supported by this server; leave it out"
    return APIError(400, found, param=where.partition(".")[0], code="unsupported_parameter")


def _either(options: Sequence[str]) -> str:
    shown = [f'"{option}"' for option in options]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def texts(content: Any, where: str, kind: str, remedy: str, rest: Callable[[JSONObject], None]) -> str:
    """A text, or the texts of a list's parts, all of this kind; `rest` takes what else a part may hold. Raises as
    `JSONObject`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, "is missing" if content is None else f"is {short(content)}", remedy)
    found: list[str] = []
    for i, value in enumerate(content):
        part = JSONObject(value, f"{where}.{i}")
        part.one_of("type", (kind,))
        found.append(part.text("text"))
        rest(part)
        part.end()
    return "\n".join(found)


class Messages:
    """Messages in the form that chat templates take, made one after another.

    Attributes:
        row: all of them.
    """

    def __init__(self) -> None:
        self.row: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Of the functions called, by the id of the call."""

    def assistants(self) -> dict[str, Any]:
        """The last message; a new one where that is not the assistant's."""
        if not self.row or self.row[-1]["role"] != "assistant":
            self.row.append({"role": "assistant", "content": ""})
        return self.row[-1]

    def call(self, identity: str, name: str, arguments: str) -> None:
        """The assistant calls a function."""
        self._names[identity] = name
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.assistants().setdefault("tool_calls", []).append(call)

    def result(self, identity: str, text: str, where: str, kind: str, remedy: str) -> None:
        """What the function has answered that was called so. Raises a 400 APIError where none was: `kind` is what a
        client calls a call, and `where` the id stands."""
        if (name := self._names.get(identity)) is None:
            raise bad(where, f"is {short(identity)}, which no earlier {kind} has", remedy)
        self.row.append({"role": "tool", "tool_call_id": identity, "name": name, "content": text})
