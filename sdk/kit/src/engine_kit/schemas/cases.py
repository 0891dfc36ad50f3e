"""What a JSON schema asks, case by case: `reading` reads a schema as cases, of which an instance fits one or more.

A case is about instances of one type, or about some constants. Two cases that have to hold at once are merged into one,
so that nothing of `allOf`, or of keywords beside a `$ref`, is left. The schemas within a case are *states*: sets of
terms that hold together, each a schema as it was written, or its opposite. A state is read when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from engine_kit.schemas.pattern import matches

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
    return FALSE if FALSE in (left & FALSE, right & FALSE) else left | right


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
        """The state of a property that has no entry of its own: of the families that its name fits, or of the rest."""
        state = TRUE if matching else self.more
        for pattern in matching:
            state = both(state, self.families[pattern])
        return state

    def item(self, place: int) -> State:
        """The state of an item."""
        return self.prefix[place] if place < len(self.prefix) else self.items


Cases = list[Case]


def type_of(value: Any) -> str:
    """The JSON type of a constant; "number" for whole ones, too."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


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


def distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    """Constants, none twice."""
    found: dict[str, Any] = {}
    for value in values:
        found.setdefault(spelled(value), value)
    return tuple(found.values())


def spelled(value: Any) -> str:
    """The same for constants that are one JSON value: 1 is 1.0, and neither is true."""
    return repr(_canonical(value))


def _canonical(value: Any) -> Any:
    """So that values that are the same look the same."""
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_canonical(part) for part in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def joined_constants(cases: Cases) -> Cases:
    """With one case of constants at most, where the first stands. Those that evaluate something stay apart."""
    constants = [case for case in cases if case.type == "enum" and case.seen == NOTHING_SEEN]
    if len(constants) < 2:
        return cases
    joined = Case(type="enum", values=distinct([value for case in constants for value in case.values]))
    return [joined if case is constants[0] else case for case in cases if case is constants[0] or case not in constants]


def exact(value: float) -> Fraction:
    """A number as it is written."""
    return Fraction(str(value))


def out_of_bounds(kind: str, of: str, node: Mapping[str, Any]) -> Cases:
    """The cases of what is shorter or longer than a schema says."""
    least, most = int(node.get(f"min{of}", 0)), node.get(f"max{of}")
    found = [Case(type=kind, most=least - 1)] if least else []
    return found if most is None else [*found, Case(type=kind, least=int(most) + 1)]


def count_fits(count: int, case: Case) -> bool:
    """Whether a length is within the bounds."""
    return case.least <= count and (case.most is None or count <= case.most)


def number_fits(value: float, case: Case) -> bool:
    """Whether a number is within the bounds, and a multiple."""
    number = exact(value)
    if case.low is not None and (number < case.low or (case.low_open and number == case.low)):
        return False
    if case.high is not None and (number > case.high or (case.high_open and number == case.high)):
        return False
    return case.step is None or (number / case.step).denominator == 1


def text_fits(value: str, case: Case) -> bool:
    """Whether a text has the length and the patterns. Raises PatternError."""
    return count_fits(len(value), case) and all(matches(pattern, value) for pattern in case.patterns)


def everything() -> Cases:
    """The cases that allow everything."""
    return [Case(type=kind) for kind in TYPES]


def but(kind: str) -> Cases:
    """The cases that allow everything of other types."""
    return [Case(type=t) for t in TYPES if t != kind]


def stated_types(node: Mapping[str, Any]) -> list[str]:
    """The types of a schema that says some, else all."""
    stated = node.get("type", TYPES)
    return [stated] if isinstance(stated, str) else list(dict.fromkeys(stated))


def fraction(value: Any) -> Fraction | None:
    """A keyword's number as it is written; None for none."""
    return None if value is None else exact(value)


def bounds_below(node: Mapping[str, Any]) -> list[tuple[Fraction | None, bool]]:
    """The least that a schema's numbers may be, and whether that is left out, by each keyword."""
    return [
        (fraction(node.get("minimum")), False),
        (fraction(node.get("exclusiveMinimum")), "exclusiveMinimum" in node),
    ]


def bounds_above(node: Mapping[str, Any]) -> list[tuple[Fraction | None, bool]]:
    """The same of the most."""
    return [
        (fraction(node.get("maximum")), False),
        (fraction(node.get("exclusiveMaximum")), "exclusiveMaximum" in node),
    ]
