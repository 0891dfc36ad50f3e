"""JSON that arrives in pieces: told apart from what is none, character by character, each looked at once."""

from __future__ import annotations

import re

MAX_DEPTH = 256
"""Objects and lists inside each other; deeper text is no JSON here, as it is none for the parsers of most clients."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(r"[0-9]*")
_BLANK = re.compile(r"[ \t\n\r]*")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# What comes next.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA, _STRING, _ESCAPE, _HEX, _LITERAL, _NUMBER = range(11)

# Places in a number (RFC 8259): after the minus, after a leading 0, in the whole part, after the point, in the
# fraction, after the e, after its sign, in the exponent.
_MINUS, _ZERO, _WHOLE, _POINT, _FRACTION, _E, _SIGN, _EXPONENT = range(8)
_NUMBER_MAY_END = frozenset({_ZERO, _WHOLE, _FRACTION, _EXPONENT})
_AFTER_DIGIT = {
    _WHOLE: _WHOLE, _POINT: _FRACTION, _FRACTION: _FRACTION, _E: _EXPONENT, _SIGN: _EXPONENT, _EXPONENT: _EXPONENT,
}  # fmt: skip


def escaped(text: str) -> str:
    """Text as it stands inside the quotes of a JSON string."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(_escape(c) if c in '"\\' or c < " " else c for c in text)


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return _CONTROLS.get(character) or f"\\u{ord(character):04x}"


class JsonStream:
    """Reads one JSON value (RFC 8259).

    Two slips that models make, and that leave no doubt, are mended: a line break or another control character inside a
    string is escaped, and a backslash that escapes nothing is doubled.

    Attributes:
        done: the value has ended. (A number ends with the first character after it.)
        failed: the text is no JSON.
        pieces: the value's text, as far as it came and is valid; who takes pieces out may do so.
    """

    __slots__ = ("_expected", "_is_key", "_left", "_mode", "_place", "_stack", "done", "failed", "pieces")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.pieces: list[str] = []
        self._stack: list[str] = []
        self._mode = _VALUE
        self._place = 0
        self._left = 0
        self._is_key = False
        self._expected = ""

    def take(self) -> str:
        """The pieces, which are then forgotten."""
        text = "".join(self.pieces)
        self.pieces.clear()
        return text

    def feed(self, text: str, position: int) -> int:
        """Read on from this position of `text`. Returns the position of the first character that is not part of the
        value: the end of `text`, unless it is done or failed."""
        start = at = position
        size = len(text)
        while at < size and not self.done:
            mode = self._mode
            if mode == _STRING:
                at = _end(_PLAIN, text, at)
                if at == size:
                    break
                character = text[at]
                if character == '"':
                    self._end_string()
                elif character == "\\":
                    self._mode = _ESCAPE
                else:
                    self.pieces += (text[start:at], _escape(character))
                    start = at + 1
                at += 1
            elif mode == _NUMBER:
                if not self._number(text[at]):
                    if self._place in _NUMBER_MAY_END:
                        self._end_value()
                        continue
                    break
                at = _end(_DIGITS, text, at + 1) if self._place in (_WHOLE, _FRACTION, _EXPONENT) else at + 1
            elif mode == _ESCAPE and text[at] not in '"\\/bfnrtu':
                if text[at] < " ":
                    break
                self.pieces += (text[start:at], "\\")
                start = at
                self._mode = _STRING
            elif mode in (_ESCAPE, _HEX, _LITERAL):
                if not self._inside(text[at]):
                    break
                at += 1
            else:
                at = _end(_BLANK, text, at)
                if at < size:
                    if not self._structure(text[at]):
                        break
                    at += 1
        self.failed = self.failed or (at < size and not self.done)
        if at > start:
            self.pieces.append(text[start:at])
        return at

    def _inside(self, character: str) -> bool:
        """Of an escape or a literal; whether it may stand there."""
        if self._mode == _ESCAPE:
            self._mode, self._left = (_HEX, 4) if character == "u" else (_STRING, 0)
            return True
        if self._mode == _HEX:
            self._left -= 1
            if not self._left:
                self._mode = _STRING
            return character in "0123456789abcdefABCDEF"
        if character != self._expected[:1]:
            return False
        self._expected = self._expected[1:]
        if not self._expected:
            self._end_value()
        return True

    def _structure(self, character: str) -> bool:
        """A character between values; whether it may stand there."""
        mode = self._mode
        if character in "}]":
            may = mode == _COMMA or mode == (_KEY_OR_END if character == "}" else _VALUE_OR_END)
            if not may or not self._stack or self._stack.pop() != character:
                return False
            self._end_value()
            return True
        if mode in (_VALUE, _VALUE_OR_END):
            return self._begin_value(character)
        if mode in (_KEY, _KEY_OR_END):
            self._mode = _STRING
            self._is_key = True
            return character == '"'
        if mode == _COLON:
            self._mode = _VALUE
            return character == ":"
        self._mode = _KEY if self._stack[-1] == "}" else _VALUE
        return character == ","

    def _begin_value(self, character: str) -> bool:
        if character == '"':
            self._mode = _STRING
            self._is_key = False
        elif character in "{[":
            self._stack.append("}" if character == "{" else "]")
            self._mode = _KEY_OR_END if character == "{" else _VALUE_OR_END
            return len(self._stack) <= MAX_DEPTH
        elif character in _LITERALS:
            self._mode = _LITERAL
            self._expected = _LITERALS[character]
        elif character == "-" or character in "0123456789":
            self._mode = _NUMBER
            self._place = _MINUS if character == "-" else _ZERO if character == "0" else _WHOLE
        else:
            return False
        return True

    def _number(self, character: str) -> bool:
        """Whether the number goes on with it."""
        place = self._place
        if character in "0123456789":
            after = _AFTER_DIGIT.get(place, -1)
            if place == _MINUS:
                after = _ZERO if character == "0" else _WHOLE
        elif character == ".":
            after = _POINT if place in (_ZERO, _WHOLE) else -1
        elif character in "eE":
            after = _E if place in (_ZERO, _WHOLE, _FRACTION) else -1
        else:
            after = _SIGN if character in "+-" and place == _E else -1
        if after < 0:
            if character in "0123456789.eE+-":  # not the end of a number: none at all
                self._place = _MINUS
            return False
        self._place = after
        return True

    def _end_string(self) -> None:
        if self._is_key:
            self._mode = _COLON
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._mode = _COMMA
        self.done = not self._stack


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where what the pattern matches from here ends; it matches the empty text, too."""
    found = pattern.match(text, position)
    assert found is not None
    return found.end()
