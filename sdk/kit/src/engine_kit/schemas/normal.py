"""JSON schemas in the few words that every grammar driver can enforce, before a driver sees them.

`normalised` keeps what a schema means, and writes it anew: each schema is `true`, `false`, an `enum` or a `const`, a
`$ref`, an `anyOf` alone, or of one `type` with keywords about that type. `allOf`, `oneOf`, `not`, `if`, the dependent
and the unevaluated keywords, keywords beside a `$ref`, identifiers and anchors are worked out, and what only describes
is dropped; patterns and formats are written in one dialect (`pattern`). What cannot be worked out stays, for
drivers to enforce or to refuse by its name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.bounded_cache import BoundedCache
from engine_kit.schemas.cases import FALSE, TRUE, TYPES, Case, State, impossible, room
from engine_kit.schemas.pattern import PatternError, whole
from engine_kit.schemas.places import refused
from engine_kit.schemas.reading import COMBINING, KNOWN, Reading

MAX_STATES = 4000
"""The most schemas that one schema may come to."""
SMALL = 160
"""Characters. What is no larger is written wherever it is used, and not under `$defs`."""
DEEP = 24
"""Schemas within schemas that are written so; what is deeper goes under `$defs`."""
REMEMBERED = 16 << 20
"""Bytes of normalised constraints that are remembered, as estimated."""


@contextmanager
def in_normal_form(constraint: StructuredOutputsParams) -> Iterator[StructuredOutputsParams]:
    """A constraint as `normalised` writes it, remembered; for a driver's `verify` and `compile`, from several threads:

        with in_normal_form(constraint) as normal:
            check(normal)

    Raises InvalidRequestError as `normalised`. What is raised within about the normalised constraint leaves as an error
    about the one that was sent.
    """
    normal = _remembered().get(msgspec.json.encode(constraint), lambda: _sized(normalised(constraint)))
    try:
        yield normal
    except InvalidRequestError as error:
        raise in_words_of(constraint, normal, error) from error


@cache
def _remembered() -> BoundedCache[bytes, StructuredOutputsParams]:
    """One for all drivers of a process: they take turns with the same constraint."""
    return BoundedCache(REMEMBERED)


def normalised(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """A verified constraint, normalised: the schemas of `json` and those within a structural tag, and a `regex`.

    Raises InvalidRequestError, which names the keyword: it has a wrong form, it refers to what is not in the schema, it
    is unknown, nothing fits it, or its cases are too many.
    """
    if constraint.json is not None:
        schema = normal(constraint.schema)
        return msgspec.structs.replace(constraint, json=schema if isinstance(schema, dict) else "true")
    if constraint.structural_tag is not None:
        tag = msgspec.json.encode(_in_tag(constraint.schema)).decode()
        return msgspec.structs.replace(constraint, structural_tag=tag)
    if constraint.regex is not None:
        return msgspec.structs.replace(constraint, regex=_regex(constraint.regex))
    return constraint


def _regex(pattern: str) -> str:
    """In the dialect. What cannot be said there some drivers may know, each in its way."""
    try:
        return whole(pattern)
    except PatternError:
        return pattern


def in_words_of(
    constraint: StructuredOutputsParams, normal: StructuredOutputsParams, error: InvalidRequestError
) -> InvalidRequestError:
    """A driver's error about a normalised constraint, as one about the constraint that was sent: by the keyword that
    its own came from, and without its place where it stood elsewhere."""
    if error.asked == normal.asked:
        return InvalidRequestError(constraint.asked, error.found, error.remedy)
    if " in the schema" not in error.asked:
        return error
    about, at, path = error.asked.partition(" in the schema at ")
    field, _, keyword = about.removesuffix(" in the schema").partition("=")
    keyword, sent = keyword.strip("'"), _keys(constraint.schema)
    came_from = ["format", *COMBINING] if keyword == "pattern" else COMBINING
    if keyword not in sent and (source := next((key for key in came_from if key in sent), "")):
        return InvalidRequestError(
            f"{field}={source!r} in the schema", f"it comes to {keyword!r}: {error.found}", error.remedy
        )
    node = constraint.schema
    for part in path.split("/")[1:] if at else ():
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    if not at or (isinstance(node, dict) and keyword in node):
        return error
    return InvalidRequestError(f"{about} in the schema", error.found, error.remedy)


def _keys(value: Any) -> set[str]:
    """All keys within decoded JSON."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(_keys, parts))


def _sized(constraint: StructuredOutputsParams) -> tuple[StructuredOutputsParams, int]:
    return constraint, 8 * len(msgspec.json.encode(constraint))


def _in_tag(tag: Any) -> Any:
    """A structural tag with its schemas normalised, wherever they stand."""
    if isinstance(tag, list):
        return [_in_tag(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    return {key: _in_tag_at(key, part) for key, part in tag.items()}


def _in_tag_at(key: str, part: Any) -> Any:
    if key in ("json_schema", "schema") and isinstance(part, (dict, bool)):
        return normal(part)
    return _regex(part) if key == "pattern" and isinstance(part, str) else _in_tag(part)


def normal(schema: Any) -> Any:
    """A JSON schema, normalised; see `normalised`."""
    try:
        written = _Writer(Reading(schema)).root()
    except RecursionError:
        raise refused("", "$ref", "its schemas are nested too deeply in each other") from None
    except PatternError as error:
        raise refused("", "pattern", str(error)) from error
    if written is False:
        keys = [key for key in schema or () if key in KNOWN and not key.startswith("$")]
        keyword = min(keys, key=lambda key: key == "type", default="false")
        raise refused("", keyword, "nothing fits the schema")
    return written


class _Writer:
    """Writes the states of a schema."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._bodies: dict[State, Any] = {}
        self._uses: Counter[State] = Counter()
        self._empty: dict[State, bool] = {}
        self._names: dict[State, str] = {}
        self._defs: dict[str, Any] = {}

    def root(self) -> Any:
        """The whole, with `$defs` where there is need."""
        root = frozenset({(True, "")})
        pending = [self._reading.state(root)]
        while pending:
            state = pending.pop()
            if state not in self._bodies:
                if len(self._bodies) >= MAX_STATES:
                    raise refused("", "$ref", f"it comes to more than {MAX_STATES} schemas")
                self._bodies[state] = self._body(state)
                used = _states(self._bodies[state])
                self._uses.update(used)
                pending += used
        self._name_circles(self._reading.state(root))
        whole = self._inlined(_Use(self._reading.state(root)), 0)
        if not self._defs:
            return whole
        return {**whole, "$defs": self._defs}

    # -- which stand under $defs --------------------------------------------------------------------------------------
    def _name_circles(self, root: State) -> None:
        done: set[State] = set()
        under_way: set[State] = set()
        stack: list[tuple[State, bool]] = [(root, False)]
        while stack:
            state, leaving = stack.pop()
            if leaving:
                under_way.discard(state)
                done.add(state)
            elif state in under_way:
                self._name(state)
            elif state not in done:
                under_way.add(state)
                stack.append((state, True))
                stack += [(used, False) for used in _states(self._bodies[state])]

    def _name(self, state: State) -> str:
        if state not in self._names:
            last = next(iter(state))[1].rpartition("/")[2] if len(state) == 1 else ""
            base = "".join(char for char in last if char.isascii() and char.isalnum()) or "schema"
            taken, name, count = set(self._names.values()), base, 1
            while name in taken:
                count += 1
                name = f"{base}_{count}"
            self._names[state] = name
        return self._names[state]

    def _inlined(self, part: Any, depth: int) -> Any:
        """A body with its states written out, or referred to."""
        if isinstance(part, _Use):
            body = self._bodies[part.state]
            large = self._uses[part.state] > 1 and len(repr(body)) > SMALL
            if isinstance(body, bool) or not (part.state in self._names or large or depth > DEEP):
                return self._inlined(body, depth + 1)
            name = self._name(part.state)
            if name not in self._defs:
                self._defs[name] = None
                self._defs[name] = self._inlined(body, 0)
            return {"$ref": f"#/$defs/{name}"}
        if isinstance(part, dict):
            return {key: self._inlined(value, depth) for key, value in part.items()}
        return [self._inlined(value, depth) for value in part] if isinstance(part, list) else part

    # -- bodies -------------------------------------------------------------------------------------------------------
    def _body(self, state: State) -> Any:
        if self._is_empty(state):
            return False
        parts = self._reading.options(state)
        if parts is not None:
            uses = [self._use(part) for part in parts]
            return True if True in uses else _any_of([use for use in uses if use is not False])
        cases = [case for case in self._reading.cases(state) if not self._is_impossible(case)]
        bare = {case.type for case in cases if case.bare}
        if bare.issuperset(TYPES):
            return True
        return _any_of([self._case(case) for case in cases])

    def _use(self, state: State) -> Any:
        state = self._reading.state(state)
        if state == TRUE:
            return True
        return False if self._is_empty(state) else _Use(state)

    def _is_empty(self, state: State) -> bool:
        """Whether nothing fits it. What would have to hold itself for ever is not found."""
        if state not in self._empty:
            self._empty[state] = state == FALSE
            if state not in (TRUE, FALSE):
                self._empty[state] = all(map(self._is_impossible, self._reading.cases(state)))
        return self._empty[state]

    def _is_impossible(self, case: Case) -> bool:
        if impossible(case) or self._reading.is_denied(case):
            return True
        if case.type == "object" and self._is_narrow(case):
            return True
        places = range(min(case.least, len(case.prefix) + 1))
        if any(self._is_empty(case.item(place)) for place in places):
            return True
        return any(low and self._is_empty(state) for state, low, _ in case.contains)

    def _is_narrow(self, case: Case) -> bool:
        """Whether an object has to have more properties than it may."""
        if case.most is not None and len(case.required) > case.most:
            return True
        if any(self._is_empty(room(case, name)) for name in case.required):
            return True
        closed = all(self._is_empty(state) for state in (case.more, *case.families.values()))
        possible = [name for name, state in case.properties.items() if not self._is_empty(state)]
        return closed and case.least > len(possible)

    def _case(self, case: Case) -> dict[str, Any]:
        if case.type == "enum":
            values = list(case.values)
            return {"const": values[0]} if len(values) == 1 else {"enum": values}
        found: dict[str, Any] = {"type": case.type}
        write = {
            "number": self._number, "integer": self._number, "string": self._string, "array": self._array,
            "object": self._object,
        }.get(case.type)  # fmt: skip
        if write is not None:
            found.update(write(case))
        opposites = [use for state in case.opposites if (use := self._use(state)) is not False]
        if opposites:
            found["not"] = opposites[0] if len(opposites) == 1 else {"anyOf": opposites}
        return found

    def _number(self, case: Case) -> dict[str, Any]:
        low, high, step = case.low, case.high, case.step
        found: dict[str, Any] = {}
        if case.type == "integer" or (step is not None and step.denominator == 1):
            found["type"] = "integer"
            step = Fraction(step.numerator) if step is not None else None  # a whole multiple of 3/2 is one of 3
            if low is not None:
                found["minimum"] = math.floor(low) + 1 if case.low_open else math.ceil(low)
            if high is not None:
                found["maximum"] = math.ceil(high) - 1 if case.high_open else math.floor(high)
        else:
            if low is not None:
                found["exclusiveMinimum" if case.low_open else "minimum"] = _plain(low)
            if high is not None:
                found["exclusiveMaximum" if case.high_open else "maximum"] = _plain(high)
        if step is not None and not (step == 1 and found.get("type") == "integer"):
            found["multipleOf"] = _plain(step)
        return found

    def _string(self, case: Case) -> dict[str, Any]:
        found = _bounds(case, "Length")
        if len(case.patterns) > 1:
            rest = [{"type": "string", "pattern": pattern} for pattern in case.patterns[1:]]
            found["pattern"] = case.patterns[0]
            found["allOf"] = rest
        elif case.patterns:
            found["pattern"] = case.patterns[0]
        return found

    def _array(self, case: Case) -> dict[str, Any]:
        prefix = [self._use(state) for state in case.prefix]
        items, most = self._use(case.items), case.most
        if False in prefix:
            most = min(prefix.index(False), len(prefix) if most is None else most)
        if items is False:
            most = min(len(prefix), len(prefix) if most is None else most)
        if most is not None and most <= len(prefix):
            prefix, items = prefix[:most], True
        while prefix and prefix[-1] == items is True:
            prefix.pop()
        found: dict[str, Any] = {}
        if prefix:
            found["prefixItems"] = prefix
        if items is not True:
            found["items"] = items
        if case.least:
            found["minItems"] = case.least
        if most is not None:
            found["maxItems"] = most
        if case.unique and (most is None or most > 1):
            found["uniqueItems"] = True
        rest = [self._contains(*contains) for contains in case.contains]
        for one in rest[:1]:
            found.update(one)
        if rest[1:]:
            found["allOf"] = [{"type": "array", **one} for one in rest[1:]]
        return found

    def _contains(self, state: State, low: int, high: int | None) -> dict[str, Any]:
        bounds = {"minContains": low} if low != 1 else {}
        return {"contains": self._use(state), **bounds, **({} if high is None else {"maxContains": high})}

    def _object(self, case: Case) -> dict[str, Any]:
        more = self._use(case.more)
        properties = {name: self._use(state) for name, state in case.properties.items()}
        for name in case.required:
            if name not in properties:
                properties[name] = self._use(room(case, name))
        uses = {pattern: self._use(state) for pattern, state in case.families.items()}
        closed = more is False and not any(use is not False for use in uses.values())
        if closed:
            uses = {}
            properties = {name: use for name, use in properties.items() if use is not False}
        found: dict[str, Any] = {}
        if properties:
            found["properties"] = properties
        if case.required:
            found["required"] = list(case.required)
        if uses:
            found["patternProperties"] = uses
        if more is not True or case.open:
            found["additionalProperties"] = more
        least, most = case.least, case.most
        if least > len(case.required):
            found["minProperties"] = least
        if most is not None and not (closed and most >= len(properties)):
            found["maxProperties"] = most
        names = self._use(case.names)
        return found if names is True else {**found, "propertyNames": names}


class _Use:
    """Where a state is used."""

    __slots__ = ("state",)

    def __init__(self, state: State) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"_Use({sorted(self.state)})"


def _any_of(parts: list[Any]) -> Any:
    """One of some schemas, none twice."""
    found = list({repr(part): part for part in parts}.values())
    if not found:
        return False
    return found[0] if len(found) == 1 else {"anyOf": found}


def _states(body: Any) -> list[State]:
    """The states that a body uses, once for each use."""
    if isinstance(body, _Use):
        return [body.state]
    parts = body.values() if isinstance(body, Mapping) else body if isinstance(body, list) else ()
    return [state for part in parts for state in _states(part)]


def _bounds(case: Case, of: str) -> dict[str, Any]:
    least = {f"min{of}": case.least} if case.least else {}
    return least if case.most is None else {**least, f"max{of}": case.most}


def _plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
