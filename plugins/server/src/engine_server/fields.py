"""Reads the JSON objects that lie deep in a request, field by field. What was not asked for is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from engine_server.errors import APIError


class JSONObject:
    """One object. A field whose value is null counts as absent.

    Args:
        value: what should be one.
        where: it stands, for errors, e.g. "messages.0".

    Raises (here and from every method) APIError, a 400 that says where.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.where = where
        if not isinstance(value, Mapping):
            raise bad(where, f"is {short(value)}", "send an object")
        self._left = {name: field for name, field in value.items() if field is not None}

    def take(self, name: str) -> Any:
        """The field's value; None where it is absent."""
        return self._left.pop(name, None)

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
        for name in self._left:
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
