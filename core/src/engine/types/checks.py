"""Checks of what users pass: they raise InvalidRequestError, which names the parameter, the value and the range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError, shown

MAX_INT = 2**31 - 1
"""The largest token id, length or count."""

Range = tuple[int, int] | tuple[float, float]
"""The least and the most that is taken. Integers for parameters that are integers."""


def invalid(name: str, value: object, found: str, remedy: str = "") -> InvalidRequestError:
    """The error about a parameter's value."""
    return InvalidRequestError(f"{name}={shown(value)}", found, remedy)


def check_ranges(params: Any, ranges: Mapping[str, Range], optional: frozenset[str] = frozenset()) -> None:
    """Check the attributes of `params` that `ranges` names; None passes for those that are `optional`."""
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if value is None and name in optional:
            continue
        if isinstance(low, int):
            check_integer(name, value, low, int(high))
        else:
            check_number(name, value, low, high)


def check_integer(name: str, value: Any, low: int = 0, high: int = MAX_INT) -> None:
    """An integer from `low` to `high`; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, value, "it is not an integer", f"pass an integer from {low} to {high}")
    if not low <= value <= high:
        raise invalid(name, value, f"it is outside {low}..{high}", f"pass a value from {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """A number from `low` to `high`, above `low` where `open_low`; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise invalid(name, value, "it is not a number", f"pass a number from {low} to {high}")
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise invalid(name, value, f"it is outside {bracket}{low}, {high}]", "pass a value in that range")


def check_flags(params: Any, *names: str, optional: bool = False) -> None:
    """Each of these attributes is true or false, or None where that is `optional`."""
    for name in names:
        value = getattr(params, name)
        if not isinstance(value, bool) and not (optional and value is None):
            raise invalid(name, value, "it is not a boolean", "pass true or false")


def check_count(name: str, count: int, most: int, unit: str, remedy: str = "send fewer") -> None:
    """At most so many. unit: what is counted, e.g. "ids"."""
    if count > most:
        raise InvalidRequestError(f"{name}={count} {unit}", f"at most {most} are taken", remedy)


def check_ids(name: str, value: Any, most: int = MAX_INT, least: int = 0, remedy: str = "send fewer") -> None:
    """A list of `least` to `most` token ids."""
    if not isinstance(value, list):
        raise invalid(name, value, "it is not a list of integers", "pass a list of token ids")
    check_count(name, len(value), most, "ids", f"name {least} to {most}" if least else remedy)
    if len(value) < least:
        raise invalid(name, value, f"it has {len(value)} ids", f"name {least} to {most}")
    if value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_INT:
        return  # as nearly always; there may be as many as a vocabulary has
    for token in value:
        check_integer(name, token)


def check_texts(name: str, value: Any, most: int, longest: int) -> None:
    """A list of at most so many texts, each of at most so many characters."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise invalid(name, value, "it is not a list of strings")
    check_count(name, len(value), most, "strings")
    check_count(name, max(map(len, value), default=0), longest, "characters in one string", "send a shorter one")


def check_travels(name: str, value: Any) -> None:
    """What can be sent to another process."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        found = f"it holds what does not travel: {error}"
        raise invalid(name, value, found, "pass numbers, strings, lists and mappings") from error
