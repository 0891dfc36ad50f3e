"""A JSON schema, read as cases (`cases`): what `allOf`, `oneOf`, `not`, `if` and references come to.

Reading is under a budget: a schema of a stranger's may multiply without end, and is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine_kit.schemas.cases import (
    FALSE,
    NOTHING_SEEN,
    TRUE,
    TYPES,
    Case,
    Cases,
    Seen,
    State,
    Term,
    Unmergeable,
    both,
    bounds_above,
    bounds_below,
    but,
    count_fits,
    distinct,
    everything,
    exact,
    fraction,
    impossible,
    joined_constants,
    merged,
    number_fits,
    out_of_bounds,
    room,
    spelled,
    stated_types,
    text_fits,
    type_of,
)
from engine_kit.schemas.formats import FORMATS
from engine_kit.schemas.pattern import PatternError, either, excluding, matches, of_length, plain
from engine_kit.schemas.places import KEYWORDS_OF, SchemaPlace, check_form, escaped, refused
from engine_kit.schemas.references import References

MAX_WORK = 40_000
"""Cases that are merged for one schema, each counted for the two of which it is: a second or so."""
MAX_CASES = 500
"""Of one schema."""
MAX_TOGETHER = 6
"""Of the parts of an `anyOf` beside an unevaluated keyword: each set of them is a case."""
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentRequired", "dependentSchemas")
NAMING = frozenset({"$id", "$anchor", "$dynamicAnchor", "$vocabulary"})
"""Keywords by which others refer to a schema, or say what they are."""
OTHERS = NAMING | {"type", "enum", "const", "then", "else", "dependencies", *COMBINING}
"""Keywords of no one type."""
KNOWN = frozenset().union(OTHERS, *KEYWORDS_OF.values())
EVERYTHING = everything()
"""The cases of `true`."""


class Reading:
    """The schemas within a schema, by their places (JSON pointers; the whole is "").

    Raises InvalidRequestError, from here and from all that it offers, which names the keyword.

    Args:
        schema: decoded JSON.
    """

    def __init__(self, schema: Any) -> None:
        self.references = References(schema)
        self._nodes: dict[str, Any] = self.references.nodes
        self._checked: set[str] = set()
        self._cases: dict[tuple[bool, str, bool], Cases] = {}
        self._of_state: dict[State, Cases] = {}
        self._flattened: dict[Term, State] = {}
        self._open: set[str] = set()
        self._under_way: set[tuple[bool, str, bool]] = set()
        self._work = 0

    # -- states -------------------------------------------------------------------------------------------------------
    def state(self, state: State) -> State:
        """The same, in terms that are no mere references to others."""
        found: State = TRUE
        for positive, place in state:
            found = both(found, FALSE if (positive, place) in FALSE else self._flat(positive, place))
        return found

    def _flat(self, positive: bool, place: str) -> State:
        """What a schema comes to that is nothing but `true`, `false`, a reference, or several at once."""
        key = positive, place
        if key in self._flattened:
            return self._flattened[key]
        node = self._node(place)
        if isinstance(node, bool):
            return TRUE if node == positive else FALSE
        asking = self._asking(place)
        if not asking:
            return TRUE if positive else FALSE
        if asking == ["$ref"]:
            terms = [self.references.target(self._place(place))]
        elif asking == ["allOf"] and positive:
            terms = [f"{place}/allOf/{i}" for i in range(len(node["allOf"]))]
        else:
            return frozenset({key})
        if place in self._open:
            raise refused(place, asking[0], "it refers to itself")
        self._open.add(place)
        found: State = TRUE
        for term in terms:
            found = both(found, self._flat(positive, term))
        self._open.discard(place)
        self._flattened[key] = found
        return found

    def options(self, state: State) -> list[State] | None:
        """The states of which one has to hold, where the source says no more than that; None for any other."""
        if len(state) != 1:
            return None
        ((positive, place),) = state
        if not positive or self._asking(place) != ["anyOf"]:
            return None
        return [frozenset({(True, f"{place}/anyOf/{i}")}) for i in range(len(self._nodes[place]["anyOf"]))]

    def cases(self, state: State) -> Cases:
        """What a state comes to."""
        if state not in self._of_state:
            found = everything()
            for positive, place in sorted(state):
                found = [] if (positive, place) in FALSE else self.together(place, found, self.of(positive, place))
            self._of_state[state] = self._shorter([self._with_names(case) for case in found])
        return self._of_state[state]

    def holds(self, value: Any, state: State) -> bool:
        """Whether a constant fits."""
        return any(self._fits(value, case) for case in self.cases(state))

    # -- schemas ------------------------------------------------------------------------------------------------------
    def _node(self, place: str) -> Any:
        node = self.references.node(place)
        if isinstance(node, Mapping) and place not in self._checked:
            self._checked.add(place)
            self._check(self._place(place))
        return node

    def _place(self, place: str) -> SchemaPlace:
        return self.references.place(place)

    def _asking(self, place: str) -> list[str]:
        return [
            key for key in self._place(place).asking if key not in ("$id", "$anchor", "$dynamicAnchor", "$vocabulary")
        ]

    def _check(self, place: SchemaPlace) -> None:
        for key in place.asking:
            if key not in KNOWN:
                raise place.refuse(key, "it is no keyword of JSON Schema that can be enforced")
        check_form(place)
        if "format" in place.schema and place.schema["format"] not in FORMATS:
            found = f"{place.schema['format']!r:.40} cannot be enforced, only {', '.join(FORMATS)}; leave it out"
            raise place.refuse("format", found)
        for key, patterns in (
            ("pattern", [place.schema.get("pattern", "")]),
            ("patternProperties", place.schema.get("patternProperties", ())),
        ):
            for pattern in patterns:
                try:
                    plain(pattern)
                except PatternError as error:
                    raise place.refuse(key, str(error)) from error

    def of(self, positive: bool, place: str, track: bool = False) -> Cases:
        """The cases of a schema, or of its opposite. With `track` they know what they evaluate."""
        key = positive, place, track
        if key not in self._cases:
            if key in self._under_way:
                raise refused(place, "$ref", "a schema that refers to itself, without a property or an item between")
            self._under_way.add(key)
            node = self._node(place)
            if isinstance(node, bool):
                found = everything() if node == positive else []
            else:
                found = self._positive(place, node, track) if positive else self._shorter(opposite(self, place, node))
            if not track:
                found = [replace(case, seen=NOTHING_SEEN) for case in found]
            self._cases[key] = self._shorter(found)
            self._under_way.discard(key)
            if len(self._cases[key]) > MAX_CASES:
                raise refused(place, self._combining(place), f"it comes to more than {MAX_CASES} cases")
        return self._cases[key]

    def _combining(self, place: str) -> str:
        node = self._nodes.get(place)
        return next((key for key in COMBINING if isinstance(node, Mapping) and key in node), "type")

    # -- two at once --------------------------------------------------------------------------------------------------
    def together(self, place: str, left: Cases, right: Cases) -> Cases:
        """The cases of two that have to hold at once."""
        if left == EVERYTHING:
            return right
        self._worked(place, sum(map(_size, left)) * len(right) + sum(map(_size, right)) * len(left))
        found: Cases = []
        for one in left:
            for other in right:
                try:
                    case = self._merged(one, other)
                except Unmergeable as error:
                    raise refused(place, str(error), "several of them at once cannot be enforced") from error
                if case is not None:
                    found.append(case)
        return self._shorter(found)

    def _worked(self, place: str, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise refused(place, self._combining(place), "it comes to too many cases")

    def _merged(self, one: Case, other: Case) -> Case | None:
        if one.type != "enum" and other.type != "enum":
            return merged(one, other)
        if one.type == "enum" and other.type == "enum":
            known = set(map(spelled, other.values))
            values = tuple(value for value in one.values if spelled(value) in known)
        else:
            constants, case = (one, other) if one.type == "enum" else (other, one)
            bare = case.bare and case.type != "integer"
            values = tuple(v for v in constants.values if (type_of(v) == case.type if bare else self._fits(v, case)))
        return Case(type="enum", values=values, seen=one.seen | other.seen) if values else None

    def _shorter(self, cases: Cases) -> Cases:
        """Without those that others say already."""
        bare = {case.type: case.seen for case in cases if case.bare}
        found: dict[Any, Case] = {}
        for case in cases:
            wider = [] if case.bare else [case.type]
            wider += ["number"] if case.type == "integer" else []
            if any(bare.get(kind) == case.seen for kind in wider):
                continue
            if case.type == "enum":
                values = [value for value in case.values if bare.get(type_of(value)) != case.seen]
                if not values:
                    continue
                case = replace(case, values=tuple(values))
            found.setdefault(case.key(), case)
        return joined_constants(list(found.values()))

    # -- what a schema says -------------------------------------------------------------------------------------------
    def _positive(self, place: str, node: Mapping[str, Any], track: bool) -> Cases:
        inner = track or "unevaluatedProperties" in node or "unevaluatedItems" in node
        found = [case for kind in stated_types(node) if not impossible(case := self._typed(place, node, kind))]
        if "enum" in node or "const" in node:
            for values in ([node["const"]] if "const" in node else None, node.get("enum")):
                if values is not None:
                    found = self.together(place, found, [Case(type="enum", values=distinct(values))])
        keys = list(node)
        own = keys.index("properties") if "properties" in node else -1
        for key, parts in self._applied(place, node, inner):
            before = keys.index(key) < own  # so that the properties stay in their order
            found = self.together(place, parts, found) if before else self.together(place, found, parts)
        for keyword, apply in (
            ("unevaluatedProperties", self._unevaluated_names),
            ("unevaluatedItems", self._unevaluated_items),
        ):
            if keyword in node:
                state = frozenset({(True, f"{place}/{keyword}")})
                try:
                    found = [result for case in found if (result := apply(case, state)) is not None]
                except Unmergeable as error:
                    raise refused(place, str(error), f"what {keyword!r} is about cannot be told") from error
        return found

    def _applied(self, place: str, node: Mapping[str, Any], track: bool) -> Iterable[tuple[str, Cases]]:
        """The keywords that combine schemas, and their cases."""
        for key in ("$ref", "$dynamicRef"):
            if key in node:
                yield key, self.of(True, self.references.target(self._place(place), key), track)
        for i in range(len(node.get("allOf", ()))):
            yield "allOf", self.of(True, f"{place}/allOf/{i}", track)
        if "anyOf" in node:
            parts = [self.of(True, f"{place}/anyOf/{i}", track) for i in range(len(node["anyOf"]))]
            yield "anyOf", self._any(place, parts)
        if "oneOf" in node:
            yield "oneOf", self._one(place, [f"{place}/oneOf/{i}" for i in range(len(node["oneOf"]))], track)
        if "not" in node:
            yield "not", self.of(False, f"{place}/not")
        if "if" in node and (track or "then" in node or "else" in node):
            then = self.of(True, f"{place}/then", track) if "then" in node else everything()
            other = self.of(True, f"{place}/else", track) if "else" in node else everything()
            passed = self.together(place, self.of(True, f"{place}/if", track), then)
            yield "if", [*passed, *self.together(place, self.of(False, f"{place}/if"), other)]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, part in node.get(key, {}).items():
                if isinstance(part, list):
                    then = [*but("object"), Case(type="object", required=tuple(dict.fromkeys([name, *part])))]
                else:
                    then = self.of(True, f"{place}/{key}/{escaped(name)}", track)
                    then = self.together(place, then, [*but("object"), Case(type="object", required=(name,))])
                    then = [case for case in then if case.type in ("object", "enum")] + but("object")
                yield key, [*then, Case(type="object", properties={name: FALSE})]

    def _any(self, place: str, parts: list[Cases]) -> Cases:
        """Beside an unevaluated keyword it matters which of them hold together."""
        if all(case.seen == NOTHING_SEEN for part in parts for case in part):
            return self._shorter([case for part in parts for case in part])
        if len(parts) > MAX_TOGETHER:
            raise refused(place, "anyOf", f"beside an unevaluated keyword at most {MAX_TOGETHER} are taken")
        sets: list[Cases] = []
        for part in parts:
            sets += [part, *(self.together(place, held, part) for held in list(sets))]
        return self._shorter([case for held in sets for case in held])

    def _one(self, place: str, parts: list[str], track: bool) -> Cases:
        found: Cases = []
        tags = [[self._tags(case) for case in self.of(True, part)] for part in parts]
        for i, part in enumerate(parts):
            cases = self.of(True, part, track)
            for j, other in enumerate(parts):
                if i != j and not _told_apart(tags[i], tags[j]) and self._meet(place, cases, self.of(True, other)):
                    cases = self.together(place, cases, self.of(False, other))
            found += cases
        return self._shorter(found)

    def _tags(self, case: Case) -> dict[str, frozenset[str]]:
        """The required properties of which a case says which constants they may be."""
        found = {}
        for name in case.required:
            cases = self.cases(self.state(room(case, name)))
            if len(cases) == 1 and cases[0].type == "enum":
                found[name] = frozenset(map(spelled, cases[0].values))
        return found

    def _meet(self, place: str, left: Cases, right: Cases) -> bool:
        """Whether something may fit both, as far as is seen."""
        return not all(self._void(case) for case in self.together(place, left, right))

    def _void(self, case: Case) -> bool:
        """Whether nothing fits, a look into required properties and first items included."""
        if impossible(case) or self.is_denied(case):
            return True
        needed = [room(case, name) for name in case.required]
        needed += [case.item(i) for i in range(min(case.least, len(case.prefix) + 1))]
        return any(self.is_void(state) for state in needed)

    def is_denied(self, case: Case) -> bool:
        """Whether one of its opposites is everything of its type."""
        types = {case.type, "number"} if case.type == "integer" else {case.type}
        return any(other.bare and other.type in types for state in case.opposites for other in self.cases(state))

    def is_void(self, state: State) -> bool:
        """Whether nothing fits a state, as far as is seen without following circles."""
        key = (True, f"void {sorted(state)}", False)
        if state == TRUE or key in self._under_way:
            return False
        self._under_way.add(key)
        try:
            return all(map(self._void, self.cases(state)))
        finally:
            self._under_way.discard(key)

    # -- keywords of one type -----------------------------------------------------------------------------------------
    def _typed(self, place: str, node: Mapping[str, Any], kind: str) -> Case:
        """What the keywords about a type say."""
        if kind in ("number", "integer"):
            low, low_open = max(bounds_below(node), key=lambda bound: (bound[0] is not None, bound[0] or 0, bound[1]))
            high, high_open = min(bounds_above(node), key=lambda bound: (bound[0] is None, bound[0] or 0, not bound[1]))
            step = fraction(node.get("multipleOf"))
            return Case(type=kind, low=low, low_open=low_open, high=high, high_open=high_open, step=step)
        bounds = {"string": "Length", "array": "Items", "object": "Properties"}.get(kind)
        if bounds is None:
            return Case(type=kind)
        most = node.get(f"max{bounds}")
        case = Case(type=kind, least=int(node.get(f"min{bounds}", 0)), most=None if most is None else int(most))
        if kind == "string":
            patterns = [plain(node["pattern"])] if "pattern" in node else []
            patterns += [plain(FORMATS[node["format"]])] if "format" in node else []
            return replace(case, patterns=tuple(pattern for pattern in patterns if pattern != of_length(0, None)))
        return self._array(place, node, case) if kind == "array" else self._object(place, node, case)

    def _array(self, place: str, node: Mapping[str, Any], case: Case) -> Case:
        prefix = tuple(_one(f"{place}/prefixItems/{i}") for i in range(len(node.get("prefixItems", ()))))
        items = _one(f"{place}/items") if "items" in node else TRUE
        seen = Seen(items=len(prefix), all_items="items" in node, some="contains" in node)
        case = replace(case, prefix=prefix, items=items, unique=node.get("uniqueItems", False), seen=seen)
        if "contains" not in node:
            return case
        low, high = int(node.get("minContains", 1)), node.get("maxContains")
        state = self.state(_one(f"{place}/contains"))
        if state == TRUE:
            most = min((bound for bound in (case.most, high) if bound is not None), default=None)
            return replace(case, least=max(case.least, low), most=None if most is None else int(most))
        if low == 0 and high is None:
            return case
        if high is not None and high < low:
            return replace(case, least=1, most=0)
        return replace(case, contains=((state, low, None if high is None else int(high)),))

    def _object(self, place: str, node: Mapping[str, Any], case: Case) -> Case:
        families: dict[str, State] = {}
        for pattern in node.get("patternProperties", ()):
            state = _one(f"{place}/patternProperties/{escaped(pattern)}")
            families[plain(pattern)] = both(families.get(plain(pattern), TRUE), state)
        properties: dict[str, State] = {}
        for name in node.get("properties", ()):
            state = _one(f"{place}/properties/{escaped(name)}")
            for pattern, of_family in families.items():
                self._worked(place, 1 + len(name) // 8)
                if matches(pattern, name):
                    state = both(state, of_family)
            properties[name] = state
        stated = "additionalProperties" in node
        more = self.state(_one(f"{place}/additionalProperties")) if stated else TRUE
        seen = Seen(names=frozenset(properties), patterns=frozenset(families), all_names=stated)
        return replace(
            case, properties=properties, required=tuple(dict.fromkeys(node.get("required", ()))), families=families,
            more=more, open=stated and more == TRUE, seen=seen,
            names=_one(f"{place}/propertyNames") if "propertyNames" in node else TRUE,
        )  # fmt: skip

    def _unevaluated_names(self, case: Case, state: State) -> Case | None:
        state = self.state(state)
        if case.type == "enum":
            if state != TRUE and any(isinstance(value, dict) for value in case.values):
                raise Unmergeable("unevaluatedProperties")
            return case
        if case.type != "object":
            return case
        seen = replace(case.seen, all_names=True)
        if case.seen.all_names:
            return case
        rest = Case(
            type="object", properties=dict.fromkeys(sorted(case.seen.names), TRUE),
            families=dict.fromkeys(sorted(case.seen.patterns), TRUE), more=state, open=state == TRUE,
        )  # fmt: skip
        found = self._merged(case, rest)
        return None if found is None else replace(found, seen=seen)

    def _unevaluated_items(self, case: Case, state: State) -> Case | None:
        state = self.state(state)
        if case.type == "enum":
            if state != TRUE and any(isinstance(value, list) for value in case.values):
                raise Unmergeable("unevaluatedItems")
            return case
        if case.type != "array" or case.seen.all_items:
            return case
        if case.seen.some and state != TRUE:
            raise Unmergeable("unevaluatedItems")
        found = self._merged(case, Case(type="array", prefix=(TRUE,) * case.seen.items, items=state))
        return None if found is None else replace(found, seen=replace(case.seen, all_items=True))

    def _with_names(self, case: Case) -> Case:
        """`propertyNames` as properties and their patterns, where it can be said so."""
        if case.type != "object" or case.names == TRUE:
            return case
        texts = [c for c in self.cases(self.state(case.names)) if c.type in ("string", "enum")]
        if any(c.bare for c in texts):
            return replace(case, names=TRUE)
        patterns: list[str] = []
        listed: list[str] = []
        for c in texts:
            if c.type == "enum":
                listed += [value for value in c.values if isinstance(value, str)]
            elif c.opposites or len(c.patterns) > 1 or (c.patterns and (c.least or c.most is not None)):
                return case
            else:
                patterns += c.patterns or (of_length(c.least, c.most),)
        if case.families and patterns:
            return case
        properties = {name: state if self.holds(name, case.names) else FALSE for name, state in case.properties.items()}
        properties |= {name: room(case, name) for name in listed if name not in properties}
        families = {either(patterns): case.more} if patterns else {}
        found = replace(case, properties=properties, families=families, more=FALSE, open=False, names=TRUE)
        return found if all(room(found, name) != FALSE for name in case.required) else replace(found, least=1, most=0)

    def slice(self, place: str, node: Mapping[str, Any], *keys: str) -> State:
        """A schema of some keywords of a schema."""
        part = {key: node[key] for key in keys or node if key in node}
        return frozenset({(True, self.references.add(place, part))})

    # -- constants ----------------------------------------------------------------------------------------------------
    def _fits(self, value: Any, case: Case) -> bool:
        self._worked("", 1)
        if case.type == "enum":
            return any(spelled(value) == spelled(constant) for constant in case.values)
        kind = type_of(value)
        if kind != case.type and not (case.type == "integer" and kind == "number" and value == int(value)):
            return False
        if any(self.holds(value, state) for state in case.opposites):
            return False
        inside: dict[str, Callable[[Any, Case], bool]] = {
            "number": number_fits, "string": text_fits, "array": self._list_fits, "object": self._mapping_fits,
        }  # fmt: skip
        return kind not in inside or inside[kind](value, case)

    def _list_fits(self, value: list[Any], case: Case) -> bool:
        if not count_fits(len(value), case) or not all(self.holds(v, case.item(i)) for i, v in enumerate(value)):
            return False
        if case.unique and len(distinct(value)) < len(value):
            return False
        for state, low, high in case.contains:
            count = sum(self.holds(item, state) for item in value)
            if count < low or (high is not None and count > high):
                return False
        return True

    def _mapping_fits(self, value: Mapping[str, Any], case: Case) -> bool:
        if not count_fits(len(value), case) or not all(name in value for name in case.required):
            return False
        names_fit = case.names == TRUE or all(self.holds(name, case.names) for name in value)
        return names_fit and all(self.holds(part, room(case, name)) for name, part in value.items())


def _told_apart(left: Sequence[dict[str, frozenset[str]]], right: Sequence[dict[str, frozenset[str]]]) -> bool:
    """Whether objects of these tags always differ in one of them."""
    return all(
        any(name in other and not values & other[name] for name, values in one.items())
        for one in left
        for other in right
    )


def _size(case: Case) -> int:
    """What it takes to merge it with another, roughly."""
    return 1 + len(case.properties) // 8 + len(case.properties) * len(case.families)


def _one(place: str) -> State:
    return frozenset({(True, place)})


# -- the opposite of a schema: what `not`, `else` and `oneOf` come to --------------------------------------------------
def opposite(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    """What fits whatever a schema does not allow: one of its keywords is not kept."""
    found: Cases = []
    if "type" in node:
        types = stated_types(node)
        found += [Case(type=t) for t in TYPES if t not in types and not (t == "number" and "integer" in types)]
        if "integer" in types and "number" not in types:
            found.append(Case(type="number", opposites=(reading.slice(place, {"type": "integer"}),)))
    for key in ("enum", "const"):
        if key in node:
            found += _but_values(reading, place, node["enum"] if key == "enum" else [node["const"]])
    against = {"number": _not_number, "string": _not_string, "array": _not_array, "object": _not_object}
    for kind, not_kept in against.items():
        if kind in stated_types(node) or (kind == "number" and "integer" in stated_types(node)):
            found += not_kept(reading, place, node)
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if key in node:
            raise refused(place, key, "the opposite of it cannot be enforced")
    for key in ("$ref", "$dynamicRef"):
        if key in node:
            found += reading.of(False, reading.references.target(reading.references.place(place), key))
    for i in range(len(node.get("allOf", ()))):
        found += reading.of(False, f"{place}/allOf/{i}")
    for key in ("anyOf", "oneOf"):
        if key in node:
            found += _none_of(reading, place, [f"{place}/{key}/{i}" for i in range(len(node[key]))])
    parts = [f"{place}/oneOf/{i}" for i in range(len(node.get("oneOf", ())))]
    for i, part in enumerate(parts):
        for other in parts[:i]:
            found += reading.together(place, reading.of(True, other), reading.of(True, part))
    if "not" in node:
        found += reading.of(True, f"{place}/not")
    if "if" in node:
        for positive, key in ((True, "then"), (False, "else")):
            if key in node:
                found += reading.together(
                    place, reading.of(positive, f"{place}/if"), reading.of(False, f"{place}/{key}")
                )
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, part in node.get(key, {}).items():
            there = [Case(type="object", required=(name,))]
            if isinstance(part, list):
                lacking = [Case(type="object", properties={other: FALSE}) for other in part]
            else:
                lacking = reading.of(False, f"{place}/{key}/{escaped(name)}")
            found += reading.together(place, there, lacking)
    return [case for case in found if not impossible(case)]


def _none_of(reading: Reading, place: str, parts: Sequence[str]) -> Cases:
    found = everything()
    for part in parts:
        found = reading.together(place, found, reading.of(False, part))
    return found


def _not_number(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    lows = [(bound, is_open) for bound, is_open in bounds_below(node) if bound is not None]
    highs = [(bound, is_open) for bound, is_open in bounds_above(node) if bound is not None]
    found = [Case(type="number", high=bound, high_open=not is_open) for bound, is_open in lows]
    found += [Case(type="number", low=bound, low_open=not is_open) for bound, is_open in highs]
    if "multipleOf" in node:
        found.append(Case(type="number", opposites=(reading.slice(place, node, "multipleOf"),)))
    return found


def _not_string(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    slices = [reading.slice(place, node, key) for key in ("pattern", "format") if key in node]
    return [*out_of_bounds("string", "Length", node), *(Case(type="string", opposites=(s,)) for s in slices)]


def _not_array(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    found = out_of_bounds("array", "Items", node)
    for i in range(len(node.get("prefixItems", ()))):
        prefix = (*(TRUE,) * i, frozenset({(False, f"{place}/prefixItems/{i}")}))
        found.append(Case(type="array", least=i + 1, prefix=prefix))
    if "items" in node and "prefixItems" not in node:
        other = reading.state(frozenset({(False, f"{place}/items")}))
        if other == TRUE:
            found.append(Case(type="array", least=1))
        elif other != FALSE:
            found.append(Case(type="array", contains=((other, 1, None),)))
    elif "items" in node:
        if node["items"] is False:
            found.append(Case(type="array", least=len(node["prefixItems"]) + 1))
        else:
            found.append(Case(type="array", opposites=(reading.slice(place, node, "prefixItems", "items"),)))
    if node.get("uniqueItems"):
        found.append(Case(type="array", opposites=(reading.slice(place, node, "uniqueItems"),)))
    if "contains" in node and node.get("minContains", 1) == 1 and "maxContains" not in node:
        found.append(Case(type="array", items=frozenset({(False, f"{place}/contains")})))
    elif "contains" in node and (node.get("minContains", 1) or "maxContains" in node):
        counted = reading.slice(place, node, "contains", "minContains", "maxContains")
        found.append(Case(type="array", opposites=(counted,)))
    return found


def _not_object(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    found = out_of_bounds("object", "Properties", node)
    found += [Case(type="object", properties={name: FALSE}) for name in node.get("required", ())]
    for name in node.get("properties", ()):
        other = frozenset({(False, f"{place}/properties/{escaped(name)}")})
        found.append(Case(type="object", required=(name,), properties={name: other}))
    if "patternProperties" in node or node.get("additionalProperties", True) is not True:
        names = reading.slice(place, node, "properties", "patternProperties", "additionalProperties")
        found.append(Case(type="object", opposites=(names,)))
    if "propertyNames" in node:
        found.append(Case(type="object", opposites=(reading.slice(place, node, "propertyNames"),)))
    return found


def _but_values(reading: Reading, place: str, values: Sequence[Any]) -> Cases:
    """Everything but some constants."""
    texts = [value for value in values if isinstance(value, str)]
    flags = {value for value in values if isinstance(value, bool)}
    found = [Case(type="null")] if None not in values else []
    other = {True, False} - flags
    found += [Case(type="enum", values=(flag,)) for flag in other] if flags else [Case(type="boolean")]
    points = sorted({exact(value) for value in values if type_of(value) == "number"})
    for low, high in zip([None, *points], [*points, None], strict=True):
        found.append(Case(type="number", low=low, low_open=low is not None, high=high, high_open=high is not None))
    found.append(Case(type="string", patterns=(excluding(texts),) if texts else ()))
    for kind, whole in (("array", list), ("object", dict)):
        of_kind = [value for value in values if isinstance(value, whole)]
        least = 1 if any(not value for value in of_kind) else 0
        opposites = tuple(reading.slice(place, {"const": value}) for value in of_kind if value)
        found.append(Case(type=kind, least=least, opposites=opposites))
    return found
