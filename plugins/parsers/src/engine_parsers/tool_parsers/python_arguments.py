"""The arguments of a call in Python's syntax, `city="Rome", days=[1, 2])`, that arrive in pieces: told as JSON."""

from __future__ import annotations

import re

from engine_kit.json_stream import MAX_DEPTH, escaped

MAX_TOKEN = 512
"""Characters of a name, of a number or of a key."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"([+-]?)0*([0-9][0-9_]*)?(?:\.([0-9_]*))?([eE][+-]?[0-9]+)?")
_TOKEN = re.compile(r"[\w.+-]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]*") for quote in "\"'"}
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_ESCAPES = {
    "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "v": "\\u000b", "a": "\\u0007", "0": "\\u0000",
    "\\": "\\\\", "'": "'", '"': '\\"', "/": "/", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}

_KEYWORD, _EQUALS, _VALUE, _VALUE_OR_END, _KEY_OR_END, _COLON, _NEXT = range(7)
_STRING, _ESCAPE, _CODE, _WORD = range(7, 11)


class PythonArguments:
    """Reads keyword arguments up to the closing parenthesis.

    Values are strings in either quotes, numbers, True, False, None, lists, tuples and dicts with strings as keys.

    Attributes:
        done: the parenthesis was read.
        failed: these are no such arguments.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._pieces = ["{"]
        self._stack = [")"]
        self._mode = _KEYWORD
        self._first = True
        self._quote = '"'
        self._is_key = False
        self._token: list[str] = []
        self._length = self._left = 0
        self._keywords: set[str] = set()

    def take(self) -> str:
        """The JSON so far, which is then forgotten."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def feed(self, text: str, position: int) -> int:
        """Read on. Returns the position of the first character that was not read."""
        size = len(text)
        while position < size and not self.done and not self.failed:
            if self._mode == _STRING:
                position = self._in_string(text, position)
            elif self._mode in (_ESCAPE, _CODE):
                self.failed = not self._escape(text[position])
                position += not self.failed
            elif self._mode == _WORD:
                position = self._in_word(text, position)
            elif text[position].isspace():
                position += 1
            else:
                self.failed = not self._structure(text[position])
                # A word begins with this very character.
                position += not self.failed and self._mode != _WORD
        return position

    # -- strings and words -------------------------------------------------------------------------------------------
    def _in_string(self, text: str, position: int) -> int:
        found = _PLAIN[self._quote].match(text, position)
        assert found is not None
        after = found.end()
        self._pieces.append(escaped(text[position:after]))
        if after == len(text):
            return after
        character = text[after]
        if character == "\\":
            self._mode = _ESCAPE
        elif character == self._quote:
            self._pieces.append('"')
            self._mode = _COLON if self._is_key else _NEXT
        else:
            self._pieces.append(escaped(character))
        return after + 1

    def _escape(self, character: str) -> bool:
        if self._mode == _ESCAPE:
            self._mode = _STRING
            if character in _HEX:
                self._mode = _CODE
                self._left = _HEX[character]
                self._token = []
            else:
                # An unknown escape is, in Python, the backslash and the character.
                self._pieces.append(_ESCAPES.get(character, "\\\\" + escaped(character)))
            return True
        if character not in "0123456789abcdefABCDEF":
            return False
        self._token.append(character)
        self._left -= 1
        if not self._left:
            code = int("".join(self._token), 16)
            if code > 0x10FFFF:
                return False
            self._pieces.append(f"\\u{code:04x}" if code < 0x10000 else chr(code))
            self._mode = _STRING
        return True

    def _in_word(self, text: str, position: int) -> int:
        """A keyword, number or constant: up to the first character that can be part of none."""
        found = _TOKEN.match(text, position, position + MAX_TOKEN + 1 - self._length)
        assert found is not None
        after = found.end()
        self._token.append(text[position:after])
        self._length += after - position
        if self._length > MAX_TOKEN:
            self.failed = True
        elif after < len(text):
            self.failed = not self._end_word("".join(self._token))
        return after

    def _end_word(self, word: str) -> bool:
        if self._is_key:
            if not _IDENTIFIER.fullmatch(word) or word in self._keywords:
                return False
            self._keywords.add(word)
            self._pieces.append(f'{"" if self._first else ", "}"{word}": ')
            self._mode = _EQUALS
            self._first = False
            return True
        json = _WORDS.get(word) or _number(word)
        if json is None:
            return False
        self._pieces.append(json)
        self._mode = _NEXT
        return True

    # -- between them ------------------------------------------------------------------------------------------------
    def _structure(self, character: str) -> bool:
        mode = self._mode
        if character in ")]}":
            return self._end(character)
        if mode == _KEYWORD:
            self._begin_word(is_key=True)
            return bool(_TOKEN.fullmatch(character))
        if mode in (_EQUALS, _COLON):
            self._mode = _VALUE
            if mode == _COLON:
                self._pieces.append(": ")
            return character == ("=" if mode == _EQUALS else ":")
        if mode == _NEXT:
            return self._comma(character)
        if mode == _KEY_OR_END:
            self._begin_string(character, is_key=True)
            return character in "\"'"
        return self._begin_value(character)

    def _comma(self, character: str) -> bool:
        if character != ",":
            return False
        if len(self._stack) == 1:
            self._mode = _KEYWORD
        else:
            # A comma may stand before the end, as Python has it; JSON's is told with what follows.
            self._mode = _KEY_OR_END if self._stack[-1] == "}" else _VALUE_OR_END
            self._first = False
        return True

    def _end(self, character: str) -> bool:
        if self._mode not in (_KEYWORD, _NEXT, _VALUE_OR_END, _KEY_OR_END) or self._stack.pop() != character:
            return False
        if not self._stack:
            self._pieces.append("}")
            self.done = True
            return True
        self._pieces.append("}" if character == "}" else "]")
        self._mode = _NEXT
        self._first = False
        return True

    def _begin_value(self, character: str) -> bool:
        if self._mode == _VALUE_OR_END:
            self._separate()
        if character in "\"'":
            self._begin_string(character, is_key=False)
        elif character in "[{(":
            self._stack.append({"[": "]", "{": "}", "(": ")"}[character])
            self._pieces.append("{" if character == "{" else "[")
            self._mode = _KEY_OR_END if character == "{" else _VALUE_OR_END
            self._first = True
            return len(self._stack) <= MAX_DEPTH
        else:
            self._begin_word(is_key=False)
            return bool(_TOKEN.fullmatch(character))
        return True

    def _separate(self) -> None:
        if not self._first:
            self._pieces.append(", ")

    def _begin_string(self, quote: str, *, is_key: bool) -> None:
        if is_key:
            self._separate()
        self._mode = _STRING
        self._quote = quote
        self._is_key = is_key
        self._pieces.append('"')

    def _begin_word(self, *, is_key: bool) -> None:
        self._mode = _WORD
        self._is_key = is_key
        self._token = []
        self._length = 0


def _number(word: str) -> str | None:
    """A number in Python's syntax as JSON; None for what is none."""
    if _NUMBER.fullmatch(word):
        return word
    found = _PYTHON_NUMBER.fullmatch(word)
    if found is None or not (found[2] or found[3] or "0" in word.partition(".")[0]):
        return None
    digits = [(found[2] or "").replace("_", ""), (found[3] or "").replace("_", "")]
    fraction = f".{digits[1] or '0'}" if found[3] is not None else ""
    return f"{'-' if found[1] == '-' else ''}{digits[0] or '0'}{fraction}{found[4] or ''}"
