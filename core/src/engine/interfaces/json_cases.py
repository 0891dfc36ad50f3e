"""What a JSON schema asks, case by case: `json_normal` reads a schema as a list of cases, of which an instance fits one.

A case is about instances of one type, or about some constants. Two cases that have to hold at once are merged into one,
so that nothing of `allOf`, or of keywords beside a `$ref`, is left. The schemas within a case are *states*: sets of terms
that hold together, each a schema as it was written, or its opposite. A state is read when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from engine.interfaces.json_pattern import matches

Term = tuple[bool, str]
"""A schema as it stands in the source, by its place; False: whatever it does not allow."""
State = frozenset[Term]
TRUE: State = frozenset()
FALSE: State = frozenset({(False, "!")})
"""Nothing fits it. No schema has the place "!"."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
"""All there are; "integer" is a part of "number"."""


class Unmergeable(Exception):
    """Two keywords that no single case expresses. Its argument names one of them."""


def both(left: State, right: State) -> State:
    """What fits both."""
    return FALSE if left >= FALSE or right >= FALSE else left | right


@dataclass(frozen=True)
class Seen:
    """What `unevaluatedProperties` and `unevaluatedItems` take as evaluated.

    Args:
        names, patterns: of properties. all_names: every one.
        items: so many first ones. all_items: every one.
        some: `contains` evaluates some, nobody knows which.
    """

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_names: bool = False
    items: int = 0
    all_items: bool = False
    some: bool = False

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_names or other.all_names,
            max(self.items, other.items),
            self.all_items or other.all_items,
            self.some or other.some,
        )


NOTHING_SEEN = Seen()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Instances of one type. What is not set asks nothing.

    Args:
        type: one of JSON Schema's seven, or "enum": constants, of whatever types.
        opposites: states that must not hold, which no keyword expresses.
        seen: for whoever asks what is left unevaluated.
    """

    type: str
    values: tuple[Any, ...] = ()  # enum
    low: Fraction | None = None  # numbers
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    step: Fraction | None = None
    least: int = 0  # minLength, minItems, minProperties
    most: int | None = None
    patterns: tuple[str, ...] = ()  # strings
    prefix: tuple[State, ...] = ()  # arrays
    items: State = TRUE
    unique: bool = False
    contains: tuple[tuple[State, int, int | None], ...] = ()
    properties: Mapping[str, State] = field(default_factory=dict)  # objects
    required: tuple[str, ...] = ()
    families: Mapping[str, State] = field(default_factory=dict)  # patternProperties
    more: State = TRUE  # additionalProperties
    open: bool = False  # the source says that there may be more
    names: State = TRUE  # propertyNames
    opposites: tuple[State, ...] = ()
    seen: Seen = NOTHING_SEEN

    def with_seen(self, seen: Seen) -> Case:
        """The same, and so much more is evaluated."""
        return self if seen == NOTHING_SEEN else replace(self, seen=self.seen | seen)

    def key(self) -> tuple[Any, ...]:
        """What tells it from other cases."""
        return (
            self.type, repr(self.values), self.low, self.low_open, self.high, self.high_open, self.step, self.least,
            self.most, self.patterns, self.prefix, self.items, self.unique, self.contains,
            frozenset(self.properties.items()), frozenset(self.required), frozenset(self.families.items()), self.more,
            self.open, self.names, self.opposites, self.seen,
        )  # fmt: skip

    @property
    def bare(self) -> bool:
        """Whether every instance of its type fits."""
        return replace(self, seen=NOTHING_SEEN, open=False).key() == Case(type=self.type).key()

    def room_of(self, name: str, matching: Sequence[str]) -> State:
        """The state of a property that has no entry of its own: of the families that its name fits, else of the rest."""
        state = TRUE if matching else self.more
        for pattern in matching:
            state = both(state, self.families[pattern])
        return state

    def item(self, place: int) -> State:
        """The state of an item."""
        return self.prefix[place] if place < len(self.prefix) else self.items


def type_of(value: Any) -> str:
    """The JSON type of a constant; "number" for whole ones, too."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def same(left: Any, right: Any) -> bool:
    """Whether two constants are one JSON value: 1 is 1.0, and neither is true."""
    if type_of(left) != type_of(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def merged(one: Case, other: Case) -> Case | None:
    """Both of two cases, neither of constants; None where nothing fits. Raises Unmergeable."""
    kind = one.type
    if {one.type, other.type} == {"number", "integer"}:
        kind = "integer"
    elif one.type != other.type:
        return None
    low, low_open = max((one.low, one.low_open), (other.low, other.low_open), key=_lowness)
    high, high_open = min((one.high, one.high_open), (other.high, other.high_open), key=_highness)
    most = min((bound for bound in (one.most, other.most) if bound is not None), default=None)
    found = Case(
        type=kind, low=low, low_open=low_open, high=high, high_open=high_open, step=_steps(one.step, other.step),
        least=max(one.least, other.least), most=most, patterns=_union(one.patterns, other.patterns),
        unique=one.unique or other.unique, contains=_union(one.contains, other.contains),
        opposites=_union(one.opposites, other.opposites), seen=one.seen | other.seen,
    )  # fmt: skip
    if kind == "array":
        places = range(max(len(one.prefix), len(other.prefix)))
        prefix = tuple(both(one.item(place), other.item(place)) for place in places)
        found = replace(found, prefix=prefix, items=both(one.items, other.items))
    elif kind == "object":
        found = _merged_objects(one, other, found)
    return None if impossible(found) else found


def _merged_objects(one: Case, other: Case, found: Case) -> Case:
    families: dict[str, State] = {}
    for left, right in ((one, other), (other, one)):
        for pattern, state in left.families.items():
            if pattern in right.families:
                families[pattern] = both(state, right.families[pattern])
            elif not right.families:
                families[pattern] = both(state, right.more)
            elif right.more == TRUE:
                families[pattern] = state
            else:
                raise Unmergeable("patternProperties")
    properties = {
        name: both(room(one, name), room(other, name)) for name in dict.fromkeys([*one.properties, *other.properties])
    }
    return replace(
        found,
        properties=properties,
        required=_union(one.required, other.required),
        families=families,
        more=both(one.more, other.more),
        open=one.open or other.open,
        names=both(one.names, other.names),
    )


def room(case: Case, name: str) -> State:
    """The state of a property of an object by its name."""
    if name in case.properties:
        return case.properties[name]
    return case.room_of(name, [pattern for pattern in case.families if matches(pattern, name)])


def impossible(case: Case) -> bool:
    """Whether nothing fits, as far as is seen without a look into states."""
    if case.low is not None and case.high is not None:
        if case.low > case.high or (case.low == case.high and (case.low_open or case.high_open)):
            return True
        if case.type == "integer" or case.step is not None:
            step = case.step or Fraction(1)
            first = math.floor(case.low / step) + 1 if case.low_open else math.ceil(case.low / step)
            last = math.ceil(case.high / step) - 1 if case.high_open else math.floor(case.high / step)
            if first > last:
                return True
    if case.most is not None and case.least > case.most:
        return True
    if case.type == "enum":
        return not case.values
    return any(state == FALSE for name, state in case.properties.items() if name in case.required)


def _lowness(bound: tuple[Fraction | None, bool]) -> tuple[bool, Fraction, bool]:
    return bound[0] is not None, bound[0] or Fraction(0), bound[1]


def _highness(bound: tuple[Fraction | None, bool]) -> tuple[bool, Fraction, bool]:
    return bound[0] is None, bound[0] or Fraction(0), not bound[1]


def _steps(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    """The least common multiple."""
    if one is None or other is None:
        return other if one is None else one
    scale = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * scale), int(other * scale)), scale)


def _union(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*one, *(part for part in other if part not in one))
