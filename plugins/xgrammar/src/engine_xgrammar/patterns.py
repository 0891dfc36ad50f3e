"""Which regular expressions XGrammar means as everybody else does.

It reads a good part of the syntax and passes over the rest with a warning: anchors within an expression, lookaheads,
escapes that it does not know. What it would pass over is refused here, by name. In the `pattern` of a JSON schema
there is more: characters that are written as escapes in JSON (quotation marks, backslashes, control characters) it
writes as they are, which is no JSON.
"""

from __future__ import annotations

import re

_PLAIN_ESCAPES = frozenset(r"\^$.*+?()[]{}|/-" + "\"' #%&,:;<=>@_`~!")
_CLASSES = frozenset("dDwWsS")
_CONTROLS = frozenset("nrtfv")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ONE_CLASS = re.compile(r"(\[(?:[^\[\]\\]|\\.)+\]|\\.|[^\\\[\](){}*+?|^$])(\*|\+|\?|\{(\d+)(,(\d*))?\}|)", re.DOTALL)
MAX_REPEATS = 4096
"""The most that counted repetitions within each other may multiply to: what they stand for is kept place by place."""


def objection(pattern: str, in_json: bool) -> str:
    """Why a pattern is refused; "" where nothing speaks against it here. Takes linear time.

    Args:
        in_json: it is the `pattern` of a JSON schema, and describes the inside of a JSON string.
    """
    return _Scan(pattern, in_json).run()


def stripped(pattern: str) -> str:
    """Without the anchors around it: it is matched as a whole."""
    pattern = pattern.removeprefix("^")
    if not pattern.endswith("$"):
        return pattern
    body = pattern[:-1]
    backslashes = len(body) - len(body.rstrip("\\"))
    return pattern if backslashes % 2 else body


def bounded(pattern: str, least: int, most: int | None) -> str | None:
    """The pattern of a JSON schema and its bounds of length as one pattern, where it repeats one class of characters,
    as "^[a-z]*$" does; None for other patterns, and where nothing is left."""
    found = _ONE_CLASS.fullmatch(stripped(pattern)) if pattern.startswith("^") else None
    if found is None or stripped(pattern) == pattern.removeprefix("^"):
        return None
    low: int
    high: int | None
    low, high = {"*": (0, None), "+": (1, None), "?": (0, 1), "": (1, 1)}.get(found[2], (0, None))
    if found[2].startswith("{"):
        low, high = int(found[3]), int(found[3]) if found[4] is None else int(found[5]) if found[5] else None
    low, high = max(low, least), min((bound for bound in (high, most) if bound is not None), default=None)
    if high is not None and low > high:
        return None
    return f"^{found[1]}{{{low},{'' if high is None else high}}}$"


class _Scan:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self._text, self._in_json = pattern, in_json
        self._bare_or = False

    def run(self) -> str:
        text = self._text
        place = 1 if text.startswith("^") else 0
        end = place + len(stripped(text))
        anchored = end - place < len(text)
        costs: list[int] = []  # of open groups: the most copies of one place within
        last = inner = 1
        while place < end:
            char = text[place]
            if char == "\\":
                place, why = self._escape(place)
                if why:
                    return why
                last = 1
                continue
            if char == "[":
                place, why = self._class(place, end)
                if why:
                    return why
                last = 1
                continue
            if char == "(":
                if text.startswith("(?", place) and not text.startswith("(?:", place):
                    return f"the group {text[place : place + 4]!r}: lookarounds, names and flags cannot be enforced"
                costs.append(inner)
                inner = last = 1
                place += 3 if text.startswith("(?:", place) else 1
                continue
            if char == ")":
                if not costs:
                    return "a ')' that nothing opens"
                last, inner = inner, max(costs.pop(), inner)
            elif char in "^$":
                return f"the anchor {char!r} within it cannot be enforced"
            elif char == "{":
                found = _REPEAT.match(text, place)
                if found is None:
                    return "a '{' that begins no repetition: write it as '\\{'"
                last *= max(int(found[2] or 0), int(found[1]), 1)
                inner = max(inner, last)
                if last > MAX_REPEATS:
                    return f"it repeats something more than {MAX_REPEATS} times, all repetitions multiplied"
                place = found.end()
                continue
            elif char == "|":
                self._bare_or |= not costs
            elif char == "." and not self._in_json:
                last = 1
            elif why := self._literal(char):
                return why
            place += 1
        if costs:
            return "a '(' that nothing closes"
        if self._bare_or and anchored:
            return "an anchor beside a '|' is ambiguous: write '^(a|b)$'"
        return ""

    def _literal(self, char: str) -> str:
        if char == "\x00":
            return "a null character cannot be enforced"
        if self._in_json and (char in '"\\' or ord(char) < 32):
            return f"{char!r} is written as an escape in JSON, which cannot be enforced in a pattern"
        return ""

    def _escape(self, place: int) -> tuple[int, str]:
        """The place behind an escape, and why it is refused."""
        text, kind = self._text, self._text[place + 1 : place + 2]
        if kind in _CLASSES and kind:
            return place + 2, ""
        if kind in _CONTROLS and kind:
            return place + 2, self._literal("\n") if self._in_json else ""
        if kind in _PLAIN_ESCAPES and kind:
            return place + 2, self._literal(kind)
        for letter, size in (("x", 2), ("u", 4)):
            digits = text[place + 2 : place + 2 + size]
            if kind == letter and re.fullmatch(rf"[0-9a-fA-F]{{{size}}}", digits):
                return place + 2 + size, self._literal(chr(int(digits, 16)))
        return place, f"the escape {text[place : place + 2]!r} cannot be enforced"

    def _class(self, place: int, end: int) -> tuple[int, str]:
        """The place behind a class of characters, and why it is refused."""
        text = self._text
        place += 1
        negated = text.startswith("^", place)
        place += negated
        first = place
        while place < end:
            char = text[place]
            if char == "]" and place > first:
                return place + 1, ""
            if char == "\\":
                place, why = self._escape(place)
                if why and not negated:
                    return place, why
                if why:
                    kind = text[place + 1 : place + 2]
                    if not kind or (kind not in _CONTROLS and kind not in _PLAIN_ESCAPES):
                        return place, why
                    place += 2
                continue
            if char == "[":
                return place, "a '[' in a class of characters is ambiguous: write it as '\\['"
            why = self._literal(char)
            if why and not negated:
                return place, why
            place += 1
        return place, "a '[' that nothing closes"
