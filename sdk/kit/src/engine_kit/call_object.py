"""A call written as a JSON object, `{"name": ..., "arguments": {...}}`, that arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from engine_kit.json_stream import JsonStream

_OPEN, _KEY_OR_END, _KEY, _READ_KEY, _COLON, _VALUE, _READ_VALUE, _NEXT = range(8)
_BLANK = " \t\n\r"
ARGUMENTS = frozenset({"arguments", "parameters"})
"""The keys under which models write the arguments."""


class CallObject:
    """Reads one such object. The keys may come in any order.

    Args:
        accepts: whether there can be a call of this name; None takes every name.
        others: further keys that may stand there and mean nothing; None for any.
        needs_arguments: an object without them is no call; otherwise it is a call without arguments.

    Attributes:
        name: once it is known and accepted.
        arguments: their text, as far as it came: to be taken out (`JsonStream.take`). None before they begin.
        done: the object has ended, and is a call.
        failed: it is no call.
    """

    def __init__(
        self,
        accepts: Callable[[str], bool] | None = None,
        others: Collection[str] | None = None,
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.name: str | None = None
        self.arguments: JsonStream | None = None
        self.done = False
        self.failed = False
        self._accepts = accepts
        self._others = others
        self._needs_arguments = needs_arguments
        self._state = _OPEN
        self._keys = set[str]()
        self._key = ""
        self._stream = JsonStream()

    def feed(self, text: str, position: int) -> int:
        """Read on. Returns the position of the first character that is not part of the object; or, so that it is
        seen, the one behind the arguments (or behind the name, where it comes after them)."""
        size = len(text)
        while position < size and not self.done and not self.failed:
            if self._state in (_READ_KEY, _READ_VALUE):
                position = self._stream.feed(text, position)
                if self._stream.failed:
                    self.failed = True
                elif self._stream.done and self._end():
                    return position
            elif text[position] in _BLANK:
                position += 1
            elif self._punctuation(text[position]):
                # A key and a value begin with this very character.
                position += self._state not in (_READ_KEY, _READ_VALUE)
            else:
                self.failed = True
        return position

    def _punctuation(self, character: str) -> bool:
        state = self._state
        if state == _OPEN:
            self._state = _KEY_OR_END
            return character == "{"
        if character == "}" and state in (_KEY_OR_END, _NEXT):
            return self._close()
        if state in (_KEY_OR_END, _KEY):
            self._state = _READ_KEY
            self._stream = JsonStream()
            return character == '"'
        if state == _COLON:
            self._state = _VALUE
            return character == ":"
        if state == _NEXT:
            self._state = _KEY
            return character == ","
        return self._begin_value(character)

    def _begin_value(self, character: str) -> bool:
        self._state = _READ_VALUE
        self._stream = JsonStream()
        if self._key == "name":
            return character == '"'
        if self._key not in ARGUMENTS:
            return True
        if character != "{" or not (self.name is None or self._accepted(self.name)):
            return False
        self.arguments = self._stream
        return True

    def _accepted(self, name: str) -> bool:
        return bool(name) and (self._accepts is None or self._accepts(name))

    def _end(self) -> bool:
        """A key or a value has ended; whether the arguments and the name are now known."""
        if self._state == _READ_KEY:
            self._key = json.loads(self._stream.take())
            self._state = _COLON
            twice = self._key in self._keys or (self._key in ARGUMENTS and self.arguments is not None)
            known = self._others is None or self._key == "name" or self._key in ARGUMENTS or self._key in self._others
            self._keys.add(self._key)
            self.failed = twice or not known
            return False
        self._state = _NEXT
        if self._key == "name":
            name = json.loads(self._stream.take())
            if self.arguments is not None and not self._accepted(name):
                self.failed = True
            else:
                self.name = name
        return self._key in ("name", *ARGUMENTS) and self.name is not None and self.arguments is not None

    def _close(self) -> bool:
        if self.name is None or (self.arguments is None and (self._needs_arguments or not self._accepted(self.name))):
            return False
        if self.arguments is None:
            self.arguments = JsonStream()
            self.arguments.feed("{}", 0)
        self.done = True
        return True
