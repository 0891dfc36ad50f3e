"""Calls as Mistral's models write them (mistral-common): after `[TOOL_CALLS]` a JSON list of objects (tokenizers up to
version 7), or a name and its arguments, the marker repeated (from version 11 on)."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from engine.interfaces.context import FrontContext
from engine.interfaces.tool_parser import CallForm, FunctionTool, ToolStream
from engine_kit.call_object import CallObject
from engine_kit.tool_text import MAX_NAME, ToolText, literal, skip

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9
"""Characters of a call's id: the templates of these models refuse others."""
_LETTERS = string.ascii_letters + string.digits


class MistralParser:
    """See `engine.interfaces.tool_parser.ToolParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        return MistralText()

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        return None  # the marker is a special token, and a grammar knows the bytes of others only


class MistralText(ToolText):
    """One answer."""

    def __init__(self) -> None:
        super().__init__((CALLS,))
        self._length = 0
        self._id = ""

    def announce(self, name: str, call_id: str = "") -> None:
        super().announce(name, call_id or "".join(secrets.choice(_LETTERS) for _ in range(ID_LENGTH)))

    def begin(self, marker: str) -> None:
        self.state = self.after_marker

    def after_marker(self, text: str, position: int) -> int:
        """The state that tells the two forms apart."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] == "[":
            self.state = self.in_list
            return position + 1
        self._pieces = []
        self._length = 0
        self._id = ""
        self.state = self.in_name
        return position

    # -- [{"name": ..., "arguments": {...}}, ...] ---------------------------------------------------------------------
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
        if (after := skip(text, position)) > position:
            return after
        if text[position] == ",":
            self.state = self.in_list
        elif text[position] == "]":
            self.leave()
        else:
            return self.give_up(text, position, position)
        return position + 1

    # -- name[CALL_ID]id[ARGS]{...} -----------------------------------------------------------------------------------
    def in_name(self, text: str, position: int) -> int:
        """The state in a name, or in an id."""
        at = position
        while at < len(text) and text[at] not in "[{" and not text[at].isspace() and self._length <= MAX_NAME:
            at = at + 1
            self._length = self._length + 1
        self._pieces.append(text[position:at])
        if at == len(text):
            return at
        if self._length > MAX_NAME or not self._length:
            return self.give_up(text, position, at)
        self.state = self.after_name
        return at

    def after_name(self, text: str, position: int) -> int:
        """The state after a name, or after an id."""
        if (after := skip(text, position)) > position:
            return after
        found = literal(text, position, ("{", ARGS) if self._id else ("{", ARGS, CALL_ID))
        if found is None:
            return self.give_up(text, position, position)
        if found == CALL_ID:
            self._id = "".join(self._pieces)
            self._pieces = []
            self._length = 0
            self.state = self.in_name
        elif found == ARGS:
            self.state = self.before_arguments
        elif found:
            self.state = self.before_arguments
            return position
        return position + len(found)

    def before_arguments(self, text: str, position: int) -> int:
        """The state in which the arguments begin."""
        if (after := skip(text, position)) > position:
            return after
        if text[position] != "{":
            return self.give_up(text, position, position)
        last = "".join(self._pieces)
        self.announce(self._id or last, last if self._id else "")
        self.read_arguments(self.after_arguments)
        return position

    def after_arguments(self, text: str, position: int) -> int:
        """The state after the arguments."""
        self.leave()
        return position
