"""A JSON schema, read as cases (`json_cases`): what `allOf`, `oneOf`, `not`, `if` and references come to.

Reading is under a budget: a schema of a stranger's may multiply without end, and is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from engine.interfaces.json_cases import (
    FALSE,
    NOTHING_SEEN,
    TRUE,
    TYPES,
    Case,
    Seen,
    State,
    Term,
    Unmergeable,
    both,
    impossible,
    merged,
    room,
    same,
    type_of,
)  # fmt: skip
from engine.interfaces.json_formats import FORMATS
from engine.interfaces.json_pattern import PatternError, either, excluding, matches, of_length, plain
from engine.interfaces.json_references import References
from engine.interfaces.json_schema import KEYWORDS_OF, Place, check_form, escaped, refused

MAX_WORK = 30_000
"""Cases that are merged for one schema: a second or so."""
MAX_CASES = 500
"""Of one schema."""
MAX_TOGETHER = 6
"""Of the parts of an `anyOf` beside an unevaluated keyword: each set of them is a case."""
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentRequired", "dependentSchemas")
OTHERS = frozenset(
    {
        "type", "enum", "const", "then", "else", "dependencies", "$id", "$anchor", "$dynamicAnchor", "$vocabulary",
        *COMBINING,
    }
)  # fmt: skip
"""Keywords of no one type."""
KNOWN = frozenset().union(OTHERS, *KEYWORDS_OF.values())

Cases = list[Case]


class Reading:
    """The schemas within a schema, by their places (JSON pointers; the whole is "").

    Raises InvalidRequestError, from here and from all that it offers, which names the keyword.

    Args:
        schema: decoded JSON.
    """

    def __init__(self, schema: Any) -> None:
        self._references = References(schema)
        self._nodes: dict[str, Any] = self._references.nodes
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
            terms = [self._references.target(self._place(place))]
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
                found = [] if (positive, place) in FALSE else self._both(place, found, self._of(positive, place))
            self._of_state[state] = self._shorter([self._with_names(case) for case in found])
        return self._of_state[state]

    def holds(self, value: Any, state: State) -> bool:
        """Whether a constant fits."""
        return any(self._fits(value, case) for case in self.cases(state))

    # -- schemas ------------------------------------------------------------------------------------------------------
    def _node(self, place: str) -> Any:
        node = self._references.node(place)
        if isinstance(node, Mapping) and place not in self._checked:
            self._checked.add(place)
            self._check(self._place(place))
        return node

    def _place(self, place: str) -> Place:
        return self._references.place(place)

    def _asking(self, place: str) -> list[str]:
        return [
            key for key in self._place(place).asking if key not in ("$id", "$anchor", "$dynamicAnchor", "$vocabulary")
        ]

    def _check(self, place: Place) -> None:
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

    def _of(self, positive: bool, place: str, track: bool = False) -> Cases:
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
                found = self._positive(place, node, track) if positive else self._negative(place, node)
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
    def _both(self, place: str, left: Cases, right: Cases) -> Cases:
        """The cases of two that have to hold at once."""
        self._work += len(left) * len(right)
        if self._work > MAX_WORK:
            raise refused(place, self._combining(place), "it comes to too many cases")
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

    def _merged(self, one: Case, other: Case) -> Case | None:
        if one.type != "enum" and other.type != "enum":
            return merged(one, other)
        if one.type == "enum" and other.type == "enum":
            values = tuple(value for value in one.values if any(same(value, v) for v in other.values))
        else:
            constants, case = (one, other) if one.type == "enum" else (other, one)
            values = tuple(value for value in constants.values if self._fits(value, case))
        return Case(type="enum", values=values, seen=one.seen | other.seen) if values else None

    def _shorter(self, cases: Cases) -> Cases:
        """Without those that others say already."""
        bare = {case.type: case.seen for case in cases if case.bare}
        if "number" in bare and "integer" not in bare:
            bare["integer"] = bare["number"]
        found: dict[Any, Case] = {}
        for case in cases:
            if case.type in bare and bare[case.type] == case.seen and not (case.bare and case.type != "integer"):
                continue
            if case.type == "integer" and case.bare and bare.get("number") == case.seen:
                continue
            if case.type == "enum":
                values = [value for value in case.values if bare.get(type_of(value)) != case.seen]
                if not values:
                    continue
                case = replace(case, values=tuple(values))
            found.setdefault(case.key(), case)
        return _joined_constants(list(found.values()))

    # -- what a schema says -------------------------------------------------------------------------------------------
    def _positive(self, place: str, node: Mapping[str, Any], track: bool) -> Cases:
        inner = track or "unevaluatedProperties" in node or "unevaluatedItems" in node
        found = [case for kind in _types(node) if not impossible(case := self._typed(place, node, kind))]
        if "enum" in node or "const" in node:
            for values in ([node["const"]] if "const" in node else None, node.get("enum")):
                if values is not None:
                    found = self._both(place, found, [Case(type="enum", values=_distinct(values))])
        keys = list(node)
        own = keys.index("properties") if "properties" in node else -1
        for key, parts in self._applied(place, node, inner):
            before = keys.index(key) < own  # so that the properties stay in their order
            found = self._both(place, parts, found) if before else self._both(place, found, parts)
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
                yield key, self._of(True, self._references.target(self._place(place), key), track)
        for i in range(len(node.get("allOf", ()))):
            yield "allOf", self._of(True, f"{place}/allOf/{i}", track)
        if "anyOf" in node:
            parts = [self._of(True, f"{place}/anyOf/{i}", track) for i in range(len(node["anyOf"]))]
            yield "anyOf", self._any(place, parts)
        if "oneOf" in node:
            yield "oneOf", self._one(place, [f"{place}/oneOf/{i}" for i in range(len(node["oneOf"]))], track)
        if "not" in node:
            yield "not", self._of(False, f"{place}/not")
        if "if" in node and (track or "then" in node or "else" in node):
            then = self._of(True, f"{place}/then", track) if "then" in node else everything()
            other = self._of(True, f"{place}/else", track) if "else" in node else everything()
            passed = self._both(place, self._of(True, f"{place}/if", track), then)
            yield "if", [*passed, *self._both(place, self._of(False, f"{place}/if"), other)]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, part in node.get(key, {}).items():
                if isinstance(part, list):
                    then = [*_but("object"), Case(type="object", required=tuple(dict.fromkeys([name, *part])))]
                else:
                    then = self._of(True, f"{place}/{key}/{escaped(name)}", track)
                    then = self._both(place, then, [*_but("object"), Case(type="object", required=(name,))])
                    then = [case for case in then if case.type in ("object", "enum")] + _but("object")
                yield key, [*then, Case(type="object", properties={name: FALSE})]

    def _any(self, place: str, parts: list[Cases]) -> Cases:
        """Beside an unevaluated keyword it matters which of them hold together."""
        if all(case.seen == NOTHING_SEEN for part in parts for case in part):
            return self._shorter([case for part in parts for case in part])
        if len(parts) > MAX_TOGETHER:
            raise refused(place, "anyOf", f"beside an unevaluated keyword at most {MAX_TOGETHER} are taken")
        sets: list[Cases] = []
        for part in parts:
            sets += [part, *(self._both(place, held, part) for held in list(sets))]
        return self._shorter([case for held in sets for case in held])

    def _one(self, place: str, parts: list[str], track: bool) -> Cases:
        found: Cases = []
        for i, part in enumerate(parts):
            cases = self._of(True, part, track)
            for j, other in enumerate(parts):
                if i != j and self._meet(place, cases, self._of(True, other)):
                    cases = self._both(place, cases, self._of(False, other))
            found += cases
        return self._shorter(found)

    def _meet(self, place: str, left: Cases, right: Cases) -> bool:
        """Whether something may fit both, as far as is seen."""
        return not all(self._void(case) for case in self._both(place, left, right))

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
            low, low_open = max(_lows(node), key=lambda bound: (bound[0] is not None, bound[0] or 0, bound[1]))
            high, high_open = min(_highs(node), key=lambda bound: (bound[0] is None, bound[0] or 0, not bound[1]))
            step = _fraction(node.get("multipleOf"))
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

    # -- the opposite -------------------------------------------------------------------------------------------------
    def _negative(self, place: str, node: Mapping[str, Any]) -> Cases:
        """What fits whatever a schema does not allow: one of its keywords is not kept."""
        found: Cases = []
        if "type" in node:
            types = _types(node)
            found += [Case(type=t) for t in TYPES if t not in types and not (t == "number" and "integer" in types)]
            if "integer" in types and "number" not in types:
                found.append(Case(type="number", opposites=(self._slice(place, {"type": "integer"}),)))
        for key in ("enum", "const"):
            if key in node:
                found += self._but_values(place, node["enum"] if key == "enum" else [node["const"]])
        for kind, against in (
            ("number", self._not_number), ("string", self._not_string), ("array", self._not_array),
            ("object", self._not_object),
        ):  # fmt: skip
            if kind in _types(node) or (kind == "number" and "integer" in _types(node)):
                found += against(place, node)
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if key in node:
                raise refused(place, key, "the opposite of it cannot be enforced")
        for key in ("$ref", "$dynamicRef"):
            if key in node:
                found += self._of(False, self._references.target(self._place(place), key))
        for i in range(len(node.get("allOf", ()))):
            found += self._of(False, f"{place}/allOf/{i}")
        for key in ("anyOf", "oneOf"):
            if key in node:
                found += self._none_of(place, [f"{place}/{key}/{i}" for i in range(len(node[key]))])
        parts = [f"{place}/oneOf/{i}" for i in range(len(node.get("oneOf", ())))]
        for i, part in enumerate(parts):
            for other in parts[:i]:
                found += self._both(place, self._of(True, other), self._of(True, part))
        if "not" in node:
            found += self._of(True, f"{place}/not")
        if "if" in node:
            for positive, key in ((True, "then"), (False, "else")):
                if key in node:
                    found += self._both(place, self._of(positive, f"{place}/if"), self._of(False, f"{place}/{key}"))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, part in node.get(key, {}).items():
                there = [Case(type="object", required=(name,))]
                if isinstance(part, list):
                    lacking = [Case(type="object", properties={other: FALSE}) for other in part]
                else:
                    lacking = self._of(False, f"{place}/{key}/{escaped(name)}")
                found += self._both(place, there, lacking)
        return self._shorter([case for case in found if not impossible(case)])

    def _none_of(self, place: str, parts: Sequence[str]) -> Cases:
        found = everything()
        for part in parts:
            found = self._both(place, found, self._of(False, part))
        return found

    def _not_number(self, place: str, node: Mapping[str, Any]) -> Cases:
        found = [
            Case(type="number", high=low, high_open=not is_open) for low, is_open in _lows(node) if low is not None
        ] + [Case(type="number", low=high, low_open=not is_open) for high, is_open in _highs(node) if high is not None]
        if "multipleOf" in node:
            found.append(Case(type="number", opposites=(self._slice(place, node, "multipleOf"),)))
        return found

    def _not_string(self, place: str, node: Mapping[str, Any]) -> Cases:
        slices = [self._slice(place, node, key) for key in ("pattern", "format") if key in node]
        return [*_out_of_bounds("string", "Length", node), *(Case(type="string", opposites=(s,)) for s in slices)]

    def _not_array(self, place: str, node: Mapping[str, Any]) -> Cases:
        found = _out_of_bounds("array", "Items", node)
        for i in range(len(node.get("prefixItems", ()))):
            prefix = (*(TRUE,) * i, frozenset({(False, f"{place}/prefixItems/{i}")}))
            found.append(Case(type="array", least=i + 1, prefix=prefix))
        if "items" in node and "prefixItems" not in node:
            other = self.state(frozenset({(False, f"{place}/items")}))
            if other == TRUE:
                found.append(Case(type="array", least=1))
            elif other != FALSE:
                found.append(Case(type="array", contains=((other, 1, None),)))
        elif "items" in node:
            if node["items"] is False:
                found.append(Case(type="array", least=len(node["prefixItems"]) + 1))
            else:
                found.append(Case(type="array", opposites=(self._slice(place, node, "prefixItems", "items"),)))
        if node.get("uniqueItems"):
            found.append(Case(type="array", opposites=(self._slice(place, node, "uniqueItems"),)))
        if "contains" in node and node.get("minContains", 1) == 1 and "maxContains" not in node:
            found.append(Case(type="array", items=frozenset({(False, f"{place}/contains")})))
        elif "contains" in node and (node.get("minContains", 1) or "maxContains" in node):
            counted = self._slice(place, node, "contains", "minContains", "maxContains")
            found.append(Case(type="array", opposites=(counted,)))
        return found

    def _not_object(self, place: str, node: Mapping[str, Any]) -> Cases:
        found = _out_of_bounds("object", "Properties", node)
        found += [Case(type="object", properties={name: FALSE}) for name in node.get("required", ())]
        for name in node.get("properties", ()):
            other = frozenset({(False, f"{place}/properties/{escaped(name)}")})
            found.append(Case(type="object", required=(name,), properties={name: other}))
        if "patternProperties" in node or node.get("additionalProperties", True) is not True:
            names = self._slice(place, node, "properties", "patternProperties", "additionalProperties")
            found.append(Case(type="object", opposites=(names,)))
        if "propertyNames" in node:
            found.append(Case(type="object", opposites=(self._slice(place, node, "propertyNames"),)))
        return found

    def _but_values(self, place: str, values: Sequence[Any]) -> Cases:
        """Everything but some constants."""
        texts = [value for value in values if isinstance(value, str)]
        flags = {value for value in values if isinstance(value, bool)}
        found = [Case(type="null")] if None not in values else []
        found += (
            [Case(type="boolean")] if not flags else [Case(type="enum", values=(f,)) for f in {True, False} - flags]
        )
        points = sorted({_exact(value) for value in values if type_of(value) == "number"})
        for low, high in zip([None, *points], [*points, None], strict=True):
            found.append(Case(type="number", low=low, low_open=True, high=high, high_open=True))
        found.append(Case(type="string", patterns=(excluding(texts),) if texts else ()))
        for kind, whole in (("array", list), ("object", dict)):
            of_kind = [value for value in values if isinstance(value, whole)]
            least = 1 if any(not value for value in of_kind) else 0
            opposites = tuple(self._slice(place, {"const": value}) for value in of_kind if value)
            found.append(Case(type=kind, least=least, opposites=opposites))
        return found

    def _slice(self, place: str, node: Mapping[str, Any], *keys: str) -> State:
        """A schema of some keywords of a schema."""
        part = {key: node[key] for key in keys or node if key in node}
        return frozenset({(True, self._references.add(place, part))})

    # -- constants ----------------------------------------------------------------------------------------------------
    def _fits(self, value: Any, case: Case) -> bool:
        self._work += 1
        if case.type == "enum":
            return any(same(value, constant) for constant in case.values)
        kind = type_of(value)
        if kind != case.type and not (case.type == "integer" and kind == "number" and value == int(value)):
            return False
        if any(self.holds(value, state) for state in case.opposites):
            return False
        inside: dict[str, Callable[[Any, Case], bool]] = {
            "number": _number_fits, "string": _text_fits, "array": self._list_fits, "object": self._mapping_fits,
        }  # fmt: skip
        return kind not in inside or inside[kind](value, case)

    def _list_fits(self, value: list[Any], case: Case) -> bool:
        if not _count_fits(len(value), case) or not all(self.holds(v, case.item(i)) for i, v in enumerate(value)):
            return False
        if case.unique and any(same(v, w) for i, v in enumerate(value) for w in value[:i]):
            return False
        for state, low, high in case.contains:
            count = sum(self.holds(item, state) for item in value)
            if count < low or (high is not None and count > high):
                return False
        return True

    def _mapping_fits(self, value: Mapping[str, Any], case: Case) -> bool:
        if not _count_fits(len(value), case) or not all(name in value for name in case.required):
            return False
        names_fit = case.names == TRUE or all(self.holds(name, case.names) for name in value)
        return names_fit and all(self.holds(part, room(case, name)) for name, part in value.items())


def everything() -> Cases:
    """The cases that allow everything."""
    return [Case(type=kind) for kind in TYPES]


def _but(kind: str) -> Cases:
    return [Case(type=t) for t in TYPES if t != kind]


def _one(place: str) -> State:
    return frozenset({(True, place)})


def _types(node: Mapping[str, Any]) -> list[str]:
    stated = node.get("type", TYPES)
    return [stated] if isinstance(stated, str) else list(dict.fromkeys(stated))


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    found: dict[str, Any] = {}
    for value in values:
        found.setdefault(repr(_canonical(value)), value)
    return tuple(found.values())


def _canonical(value: Any) -> Any:
    """So that values that are the same look the same."""
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_canonical(part) for part in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def _joined_constants(cases: Cases) -> Cases:
    """With one case of constants at most, where the first stands. Those that evaluate something stay apart."""
    constants = [case for case in cases if case.type == "enum" and case.seen == NOTHING_SEEN]
    if len(constants) < 2:
        return cases
    joined = Case(type="enum", values=_distinct([value for case in constants for value in case.values]))
    return [joined if case is constants[0] else case for case in cases if case is constants[0] or case not in constants]


def _exact(value: float) -> Fraction:
    return Fraction(str(value))


def _fraction(value: Any) -> Fraction | None:
    return None if value is None else _exact(value)


def _lows(node: Mapping[str, Any]) -> list[tuple[Fraction | None, bool]]:
    return [(_fraction(node.get("minimum")), False), (_fraction(node.get("exclusiveMinimum")), True)]


def _highs(node: Mapping[str, Any]) -> list[tuple[Fraction | None, bool]]:
    return [(_fraction(node.get("maximum")), False), (_fraction(node.get("exclusiveMaximum")), True)]


def _out_of_bounds(kind: str, of: str, node: Mapping[str, Any]) -> Cases:
    least, most = int(node.get(f"min{of}", 0)), node.get(f"max{of}")
    found = [Case(type=kind, most=least - 1)] if least else []
    return found if most is None else [*found, Case(type=kind, least=int(most) + 1)]


def _count_fits(count: int, case: Case) -> bool:
    return case.least <= count and (case.most is None or count <= case.most)


def _number_fits(value: float, case: Case) -> bool:
    exact = _exact(value)
    if case.low is not None and (exact < case.low or (case.low_open and exact == case.low)):
        return False
    if case.high is not None and (exact > case.high or (case.high_open and exact == case.high)):
        return False
    return case.step is None or (exact / case.step).denominator == 1


def _text_fits(value: str, case: Case) -> bool:
    return _count_fits(len(value), case) and all(matches(pattern, value) for pattern in case.patterns)
