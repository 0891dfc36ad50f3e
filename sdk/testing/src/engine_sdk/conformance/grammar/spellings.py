"""Ways to write one JSON value: all decode to the same, so a schema that forbids one forbids them all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from itertools import islice
from typing import Any

TEXTS = ("plain", "ascii", "first", "all", "upper")
NUMBERS = ("plain", "decimal", "point", "exponent", "raised", "fraction")
ORDERS = ("given", "reversed", "sorted")
SPACES = ("", " ", "\n", "\n  ")
OTHERS: tuple[Any, ...] = (0, "", None, True, [], {})
"""What a name may stand for before it stands for what counts."""
DRAWN = 8
"""How many spellings take each choice anew for each part."""
REPEATED = 96
"""The most spellings of one value in which a name stands twice."""


@dataclass(frozen=True)
class Style:
    """How the parts of a value are written; each takes one of the names above, or "any": drawn for each part.

    Args:
        keys, texts: which characters are escaped: those that must be, those beyond ASCII, the first, each.
        numbers: 12 or 1e+20, without an exponent, 12.0, 12e0, 120E-1, 0.12e+2.
        order: of an object's members.
        space: around them, and around the whole.
    """

    keys: str = "plain"
    texts: str = "plain"
    numbers: str = "plain"
    order: str = "given"
    space: str = ""


STYLES = (
    Style(),
    Style(space=" "),
    Style(space="\n"),
    Style(keys="ascii", texts="ascii"),
    Style(keys="first"),
    Style(keys="all"),
    Style(keys="upper", texts="upper"),
    Style(texts="first"),
    Style(texts="all"),
    Style(numbers="point"),
    Style(numbers="exponent"),
    Style(numbers="raised"),
    Style(numbers="fraction"),
    Style(order="reversed"),
    Style(order="sorted"),
    Style(order="reversed", keys="first"),
)
ANY = Style(*("any" for _ in fields(Style)))


@dataclass(frozen=True)
class Members:
    """An object in which a name stands twice.

    Args:
        of: name, value, and whether each character of the name is escaped. The last of a name counts.
    """

    of: tuple[tuple[str, Any, bool], ...]


def usual(value: Any) -> list[str]:
    """The usual spellings of a value, of which a driver that takes its schema has to allow one: dense, as Python writes
    it, with members in other orders, without exponents."""
    found = [json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False)]
    found += [_Writer(Style(numbers="decimal", order=order), random.Random(0)).written(value) for order in ORDERS]
    return list(dict.fromkeys(found))


def spellings(value: Any) -> list[str]:
    """Texts that decode to this value, the plainest first; the same each time. A text stands there once."""
    drawn = random.Random(0)
    found = usual(value)
    found += [_Writer(style, drawn).written(value) for style in STYLES]
    found += [_Writer(ANY, drawn).written(value) for _ in range(DRAWN)]
    found += [_Writer(Style(), drawn).written(variant) for variant in islice(_repeating(value), REPEATED)]
    return list(dict.fromkeys(found))


def _repeating(value: Any) -> Iterator[Any]:
    """The value with a name twice in one of its objects: with the same value, and with each of `OTHERS` before it."""
    if isinstance(value, dict):
        members = [(name, part, False) for name, part in value.items()]
        for place, (name, part, _) in enumerate(members):
            escaped = [*members[:place], (name, part, True), *members[place + 1 :]]
            yield Members((*members, (name, part, False)))
            yield Members((*members, (name, part, True)))
            for other in OTHERS:
                yield Members(((name, other, False), *members))
                yield Members(((name, other, False), *escaped))
        for name, part in value.items():
            yield from ({**value, name: variant} for variant in _repeating(part))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from ([*value[:place], variant, *value[place + 1 :]] for variant in _repeating(part))


class _Writer:
    def __init__(self, style: Style, drawn: random.Random) -> None:
        self._style = style
        self._drawn = drawn

    def written(self, value: Any) -> str:
        return f"{self._space()}{self._value(value)}{self._space()}"

    def _value(self, value: Any) -> str:
        if isinstance(value, (dict, Members)):
            return self._joined("{", (self._member(*member) for member in self._members(value)), "}")
        if isinstance(value, list):
            return self._joined("[", (self._value(item) for item in value), "]")
        if isinstance(value, str):
            return text(value, self._of(TEXTS, self._style.texts))
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        return number(value, self._of(NUMBERS, self._style.numbers))

    def _joined(self, begin: str, parts: Iterable[str], end: str) -> str:
        return begin + ",".join(f"{self._space()}{part}{self._space()}" for part in parts) + end

    def _member(self, name: str, value: Any, escaped: bool) -> str:
        key = text(name, "all" if escaped else self._of(TEXTS, self._style.keys))
        return f"{key}{self._space()}:{self._space()}{self._value(value)}"

    def _members(self, value: dict[str, Any] | Members) -> Iterable[tuple[str, Any, bool]]:
        if isinstance(value, Members):
            return value.of
        members = [(name, part, False) for name, part in value.items()]
        order = self._of(ORDERS, self._style.order)
        if order == "given":
            return members
        return members[::-1] if order == "reversed" else sorted(members, key=lambda member: member[0])

    def _space(self) -> str:
        return self._of(SPACES, self._style.space)

    def _of(self, names: tuple[str, ...], name: str) -> str:
        return self._drawn.choice(names) if name == "any" else name


def text(value: str, style: str) -> str:
    """A JSON string, with the characters escaped that the style says (`TEXTS`)."""
    if style in ("plain", "ascii"):
        return json.dumps(value, ensure_ascii=style == "ascii")
    if style == "first":
        return f'"{_units(value[:1])}{json.dumps(value[1:], ensure_ascii=False)[1:]}'
    return f'"{_units(value, style == "upper")}"'


def number(value: float, style: str) -> str:
    """A JSON number of exactly this value (`NUMBERS`)."""
    if style == "plain":
        return json.dumps(value)
    sign, digits, power = Decimal(repr(value)).as_tuple()
    assert isinstance(power, int), "JSON has neither infinities nor what is no number"
    minus, shown = "-" * sign, "".join(map(str, digits))
    if style in ("decimal", "point"):
        written = f"{Decimal(repr(value)):f}"
        return written if style == "decimal" else f"{written}0" if "." in written else f"{written}.0"
    if style == "exponent" or shown == "0":
        return f"{minus}{shown}e{power}"
    if style == "raised":
        return f"{minus}{shown}0E{power - 1:+}"
    return f"{minus}0.{shown}e{power + len(shown):+}"


def _units(value: str, upper: bool = False) -> str:
    data = value.encode("utf-16-be", "surrogatepass")
    return "".join(
        f"\\u{data[place]:02X}{data[place + 1]:02X}" if upper else f"\\u{data[place]:02x}{data[place + 1]:02x}"
        for place in range(0, len(data), 2)
    )
