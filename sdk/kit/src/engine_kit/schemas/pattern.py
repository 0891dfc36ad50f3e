"""Regular expressions: read as ECMA-262 means them, written in one dialect that every engine reads alike.

Engines differ in what `.`, `\\s`, `\\d` and `$` stand for, and in whether a pattern is searched for or has to match the
whole text. In the dialect a pattern is matched as a whole, from `^` to `$`, and uses nothing but literal characters,
classes of characters that are spelled out, `(?:...)`, `|`, and greedy repetitions. Characters are code points, as under
ECMA-262's flag `u`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

MAX_NESTING = 60
"""How deep groups may stand within each other."""
SHORT = 1000
"""Characters of a pattern that is remembered once it is read."""
MAX_STEPS = 50_000
"""Of one comparison of a text with a pattern."""
LAST = 0x10FFFF
"""The highest code point."""
_DIGITS = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")

Ranges = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """Why a pattern cannot be enforced."""


@dataclass(frozen=True)
class Chars:
    """One character.

    Args:
        ranges: of code points, sorted, apart from each other.
        named: classes by Unicode property ("\\p{L}"), which only some engines know.
        negated: every other one.
    """

    ranges: Ranges
    named: tuple[str, ...] = ()
    negated: bool = False

    def has(self, low: int, high: int) -> bool:
        """Whether one of these code points may stand there; where Unicode's tables are asked, it may."""
        return bool(self.named) or any(first <= high and low <= last for first, last in self.ranges)


@dataclass(frozen=True)
class Concat:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of its parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part so many times; `high` None: without end."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Anchor:
    """`^` or `$`."""

    sign: str


Node = Chars | Concat | Either | Repeat | Anchor
ANY = Chars(((0, LAST),))
_REST = Repeat(ANY, 0, None)


def plain(pattern: str) -> str:
    """A schema's `pattern` in the dialect. Raises PatternError."""
    return written(parsed(pattern))


def whole(pattern: str) -> str:
    """A pattern that is matched as a whole, as a constraint by regular expression is, in the dialect; anchors around it
    say nothing. Raises PatternError."""
    return written(_whole(_Reader(pattern).read(), open_=False))


def parsed(pattern: str) -> Node:
    """What a schema's pattern, or one in the dialect, matches as a whole text: without anchors. Raises PatternError."""
    return _remembered(pattern) if len(pattern) <= SHORT else _whole(_Reader(pattern).read())


@lru_cache(256)
def _remembered(pattern: str) -> Node:
    return _whole(_Reader(pattern).read())


def matches(pattern: str, text: str) -> bool:
    """Whether a text fits a pattern. Raises PatternError where that takes too long, or asks for Unicode's tables."""
    return len(text) in _Walk(text).ends(parsed(pattern), frozenset((0,)))


def characters(pattern: str) -> Iterator[Chars]:
    """Each place of a pattern where one character stands. Raises PatternError."""
    pending = [parsed(pattern)]
    while pending:
        node = pending.pop()
        if isinstance(node, Chars):
            yield node
        elif isinstance(node, Repeat):
            pending.append(node.part)
        elif not isinstance(node, Anchor):
            pending += node.parts


def excluding(texts: Iterable[str]) -> str:
    """The pattern of every text but these, in the dialect."""
    return written(_excluding(sorted(set(texts))))


def either(patterns: Sequence[str]) -> str:
    """The pattern of what fits one of them, in the dialect."""
    return written(_either([parsed(pattern) for pattern in patterns]))


def of_length(least: int, most: int | None) -> str:
    """The pattern of texts of so many characters, in the dialect."""
    return written(Repeat(ANY, least, most))


def written(node: Node) -> str:
    """A pattern in the dialect."""
    text = _text(node)
    return f"^(?:{text})$" if isinstance(node, Either) else f"^{text}$"


# -- reading -----------------------------------------------------------------------------------------------------------
class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._either()
        if self._at < len(self._text):
            raise PatternError("a ')' that nothing opens")
        return node

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _either(self) -> Node:
        parts = [self._sequence()]
        while self._peek("|"):
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _atom(self) -> Node:
        char = self._text[self._at]
        self._at += 1
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return Chars(complement(_LINE_ENDS))
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == "\\":
            return self._escape()
        if char in "*+?":
            raise PatternError(f"a {char!r} that repeats nothing")
        if char == "{":
            raise PatternError("a '{' that begins no repetition: write it as '\\{'")
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Node:
        start = self._at - 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise PatternError(f"it is nested more than {MAX_NESTING} deep")
        if self._peek("?:"):
            self._at += 2
        elif self._peek("?"):
            what = self._text[start : start + 4]
            raise PatternError(f"the group {what!r}: lookarounds, names and flags cannot be enforced")
        node = self._either()
        if not self._peek(")"):
            raise PatternError("a '(' that nothing closes")
        self._at += 1
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        while self._at < len(self._text):
            char = self._text[self._at]
            bounds: tuple[int, int | None] | None = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char)
            if bounds is not None:
                self._at += 1
            elif char == "{":
                bounds = self._counts()
            else:
                break
            if isinstance(node, Anchor):
                raise PatternError(f"the anchor {node.sign!r} cannot be repeated")
            node = Repeat(node, *bounds)
            if self._peek("?"):  # lazy, which says nothing of what fits
                self._at += 1
            if self._text[self._at : self._at + 1] in ("*", "+", "?", "{"):
                raise PatternError(f"the repetition {self._text[self._at]!r} of a repetition")
        return node

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _digits(low) or (high and not _digits(high)):
            raise PatternError("a '{' that begins no repetition: write it as '\\{'")
        least, most = int(low), (int(high) if high else None) if comma else int(low)
        if most is not None and most < least:
            raise PatternError(f"the repetition {{{low},{high}}}, whose bounds are the wrong way round")
        self._at = end + 1
        return least, most

    def _escape(self) -> Node:
        kind = self._text[self._at : self._at + 1]
        if kind in ("b", "B"):
            raise PatternError(f"the escape '\\{kind}': word boundaries cannot be enforced")
        if kind == "k" or (kind and kind in "123456789"):
            raise PatternError(f"the escape '\\{kind}': references to groups cannot be enforced")
        return self._escaped_class() or Chars((self._escaped_char(),))

    def _escaped_class(self) -> Chars | None:
        """The class behind a backslash; None where a character stands there."""
        kind = self._text[self._at : self._at + 1]
        ranges = {"d": _DIGITS, "w": _WORD, "s": _SPACE}.get(kind.lower()) if kind else None
        if ranges is not None:
            self._at += 1
            return Chars(ranges if kind.islower() else complement(ranges))
        if kind in ("p", "P") and self._text[self._at + 1 : self._at + 2] == "{":
            end = self._text.find("}", self._at)
            name = self._text[self._at : end + 1]
            if end < 0 or not name[2:-1].replace("_", "").replace("=", "").isalnum():
                raise PatternError(f"the escape '\\{kind}' without a property")
            self._at = end + 1
            return Chars((), (f"\\{name}",))
        return None

    def _escaped_char(self) -> tuple[int, int]:
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        following = self._text[self._at : self._at + 1]
        code: int | None = None
        if kind in _CONTROLS and not (kind == "0" and _digits(following)):
            code = _CONTROLS[kind]
        elif kind == "c" and following.isascii() and following.isalpha():
            self._at += 1
            code = ord(following) % 32
        elif kind == "u" and following == "{":
            end = self._text.find("}", self._at)
            code = self._hex(self._text[self._at + 1 : max(end, 0)])
            self._at = end + 1
        elif kind in ("x", "u"):
            code = self._unit(2 if kind == "x" else 4)
        elif kind and (kind in _SYNTAX or not (kind.isalnum() or kind == "_")):
            code = ord(kind)
        if code is None:
            raise PatternError(f"the escape '\\{kind}' cannot be enforced")
        if 0xD800 <= code <= 0xDFFF:
            raise PatternError("half a surrogate pair cannot be enforced")
        return code, code

    def _unit(self, size: int) -> int:
        code = self._hex(self._text[self._at : self._at + size], size)
        self._at += size
        if 0xD800 <= code <= 0xDBFF and self._peek("\\u"):
            low = self._hex(self._text[self._at + 2 : self._at + 6], 4)
            if 0xDC00 <= low <= 0xDFFF:
                self._at += 6
                return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
        return code

    def _hex(self, digits: str, size: int | None = None) -> int:
        if not digits or (size is not None and len(digits) != size) or set(digits) - set("0123456789abcdefABCDEF"):
            raise PatternError(f"the escape of a character by {digits!r:.20}, which is no hexadecimal number")
        if (code := int(digits, 16)) > LAST:
            raise PatternError(f"the character {digits!r:.20}, which there is not")
        return code

    def _class(self) -> Chars:
        negated = self._peek("^")
        self._at += negated
        ranges: list[tuple[int, int]] = []
        named: list[str] = []
        while not self._peek("]"):
            low = self._member()
            if not isinstance(low, Chars) and self._peek("-") and not self._peek("-]"):
                self._at += 1
                high = self._member()
                if isinstance(high, Chars) or high[0] < low[0]:
                    raise PatternError("a class of characters with a range whose ends are no characters in order")
                low = low[0], high[0]
            if isinstance(low, Chars):
                ranges += low.ranges
                named += low.named
            else:
                ranges.append(low)
        self._at += 1
        joined = _joined(ranges)
        if named:
            return Chars(joined, tuple(sorted(set(named))), negated)
        return Chars(complement(joined) if negated else joined)

    def _member(self) -> Chars | tuple[int, int]:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise PatternError("a '[' that nothing closes")
        self._at += 1
        if char != "\\":
            return ord(char), ord(char)
        if self._peek("b"):
            self._at += 1
            return 8, 8
        if self._peek("-"):
            self._at += 1
            return 45, 45
        return self._escaped_class() or self._escaped_char()


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """The other characters."""
    found, place = [], 0
    for low, high in ranges:
        if place < low:
            found.append((place, low - 1))
        place = high + 1
    return (*found, (place, LAST)) if place <= LAST else tuple(found)


# -- anchors -----------------------------------------------------------------------------------------------------------
def _whole(node: Node, open_: bool = True) -> Node:
    """What a pattern matches as a whole text: without anchors, and free text where none stood, if `open_`."""
    return _either([_sequence(_ends(list(parts), open_)) for parts in _anchored(node)])


def _anchored(node: Node) -> list[tuple[Node, ...]]:
    """Its alternatives, as far as anchors stand in them, each as the parts one after the other."""
    if isinstance(node, Either) and _has_anchor(node):
        return _bounded([parts for part in node.parts for parts in _anchored(part)])
    if isinstance(node, Concat):
        found: list[tuple[Node, ...]] = [()]
        for part in node.parts:
            found = _bounded([(*left, *right) for left in found for right in _anchored(part)])
        return found
    return [(node,)]


def _bounded(found: list[tuple[Node, ...]]) -> list[tuple[Node, ...]]:
    if len(found) > 64:
        raise PatternError("too many alternatives with anchors")
    return found


def _has_anchor(node: Node) -> bool:
    if isinstance(node, (Concat, Either)):
        return any(map(_has_anchor, node.parts))
    return isinstance(node, Anchor) or (isinstance(node, Repeat) and _has_anchor(node.part))


def _ends(parts: list[Node], open_: bool) -> list[Node]:
    """Parts without the anchors at their ends; where none stood there may be more, if `open_`."""
    start = end = False
    while parts and parts[0] == Anchor("^"):
        start, parts = True, parts[1:]
    while parts and parts[-1] == Anchor("$"):
        end, parts = True, parts[:-1]
    if any(map(_has_anchor, parts)):
        raise PatternError("an anchor within it cannot be enforced")
    if open_ and not parts and not (start and end):
        return [_REST]
    return [*([] if start or not open_ else [_REST]), *parts, *([] if end or not open_ else [_REST])]


def _sequence(parts: Sequence[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Concat(tuple(parts))


def _either(parts: Sequence[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Either(tuple(parts))


def _excluding(texts: list[str]) -> Node:
    """Every text but these, of which none stands twice."""
    here = "" in texts
    heads = sorted({text[0] for text in texts if text})
    others = Chars(complement(_joined((ord(head), ord(head)) for head in heads)))
    parts: list[Node] = [] if here else [Concat(())]
    parts.append(Concat((others, _REST)))
    for head in heads:
        below = _excluding([text[1:] for text in texts if text[:1] == head])
        parts.append(Concat((Chars(((ord(head), ord(head)),)), below)))
    return _either(parts)


# -- writing -----------------------------------------------------------------------------------------------------------
def _text(node: Node) -> str:
    if isinstance(node, Chars):
        return _chars(node)
    if isinstance(node, Concat):
        return "".join(f"(?:{_text(part)})" if isinstance(part, Either) else _text(part) for part in node.parts)
    if isinstance(node, Either):
        return "|".join(_text(part) for part in node.parts)
    if isinstance(node, Anchor):
        _unreachable(node)
    inner = _text(node.part)
    inner = inner if isinstance(node.part, Chars) else f"(?:{inner})"
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    if counts is None:
        high = "" if node.high is None else str(node.high)
        counts = f"{{{node.low}}}" if node.low == node.high else f"{{{node.low},{high}}}"
    return inner + counts


def _unreachable(node: Node) -> NoReturn:
    raise AssertionError(f"{node} is left of a pattern that is matched as a whole")


def _chars(node: Chars) -> str:
    if node == ANY:
        return "[\\s\\S]"
    if not node.ranges and not node.named:
        raise PatternError("a class of no characters")
    if not node.named and node.ranges[0][0] == node.ranges[-1][1]:
        return _char(node.ranges[0][0], _SYNTAX)
    ranges, negated = node.ranges, node.negated
    if not node.named and ranges[-1][1] == LAST:
        ranges, negated = complement(ranges), True
    inner = "".join(
        _char(low, _IN_CLASS)
        if low == high
        else _char(low, _IN_CLASS) + ("-" if high > low + 1 else "") + _char(high, _IN_CLASS)
        for low, high in ranges
    )
    return f"[{'^' if negated else ''}{''.join(node.named)}{inner}]"


_IN_CLASS = frozenset("\\]^-[&~")


def _char(code: int, escaped: frozenset[str]) -> str:
    char = chr(code)
    if char in escaped:
        return "\\" + char
    return f"\\x{code:02x}" if code < 32 or 127 <= code < 160 else char


# -- comparing ---------------------------------------------------------------------------------------------------------
class _Walk:
    """Where in a text a pattern may end, by sets of places: never more than `MAX_STEPS`, whatever the pattern."""

    def __init__(self, text: str) -> None:
        self._codes = [ord(char) for char in text]
        self._steps = 0

    def ends(self, node: Node, starts: frozenset[int]) -> frozenset[int]:
        self._steps += 1 + len(starts)
        if self._steps > MAX_STEPS:
            raise PatternError("comparing a text with it takes too long")
        if isinstance(node, Chars):
            return frozenset(self._after(node, starts))
        if isinstance(node, Concat):
            for part in node.parts:
                starts = self.ends(part, starts) if starts else starts
            return starts
        if isinstance(node, Either):
            return frozenset().union(*(self.ends(part, starts) for part in node.parts))
        if isinstance(node, Anchor):
            _unreachable(node)
        return self._repeated(node, starts)

    def _repeated(self, node: Repeat, starts: frozenset[int]) -> frozenset[int]:
        for _ in range(node.low):
            later = self.ends(node.part, starts)
            if later == starts:  # further rounds change nothing
                break
            starts = later
        found, count = set(starts), node.low
        while starts and (node.high is None or count < node.high):
            starts = self.ends(node.part, starts) - found
            found |= starts
            count += 1
        return frozenset(found)

    def _after(self, node: Chars, starts: frozenset[int]) -> Iterator[int]:
        if node.named:
            raise PatternError(f"{node.named[0]!r} cannot be compared with a text here")
        for place in starts:
            if place < len(self._codes) and any(low <= self._codes[place] <= high for low, high in node.ranges):
                yield place + 1
