"""A grammar driver for the suite's own cases, written to be broken: it lists every text that fits, and judges texts
under the schemas of the suite's table."""

from __future__ import annotations

import itertools
import json
import re._parser as parser  # what re compiles from: a tree of the pattern
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from judge import Judged, altered, fits, table, valid

from engine.interfaces.grammar import Matcher
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import in_normal_form
from engine_reference.grammar_choice import ChoiceBody
from engine_sdk.conformance.grammar.decoding import decoded
from engine_sdk.conformance.grammar.values import Held

REPEATS = 4


class Plain(ChoiceBody):
    """See `engine.interfaces.grammar.Grammar`. `dropped` names the schema keywords that are not read."""

    dropped: ClassVar[frozenset[str]] = frozenset()
    dot: ClassVar[str] = "bé日"
    """What stands for any character, and for any but some."""

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        with in_normal_form(constraint) as normal:
            return self.compile_normal(normal, end_token_ids)

    def compile_normal(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        texts = constraint.choice
        if constraint.regex is not None:
            texts = list(self.matches(constraint.regex))
        elif constraint.json is not None:
            schema = constraint.schema
            if (entries := table().get(json.dumps(schema))) is not None:
                return Judged(lambda text: any(self.judge(held, text) for held in entries), end_token_ids)
            texts = [json.dumps(value, separators=(",", ":")) for value in self.values(schema, schema)]
        elif constraint.json_object:
            texts = ["{}", '{"a":1}']
        return super().compile(StructuredOutputsParams(choice=texts), end_token_ids)

    # -- the suite's table -------------------------------------------------------------------------------------------
    def judge(self, held: Held, text: str) -> bool:
        """Whether a text fits a schema of the table, or what is read in its place."""
        if fits(held, text):
            return True
        read = altered(held.schema, self.rule)
        try:
            return read != held.schema and valid(read, decoded(text))
        except ValueError:
            return False

    def rule(self, schema: dict[str, Any], behind: tuple[str, ...]) -> dict[str, Any]:
        """What a schema behind these keywords is read as."""
        return {key: part for key, part in schema.items() if key not in self.dropped}

    # -- regular expressions -----------------------------------------------------------------------------------------
    def matches(self, pattern: str) -> Iterator[str]:
        return self._sequence(list(parser.parse(pattern)))

    def _sequence(self, items: list[Any]) -> Iterator[str]:
        for parts in itertools.product(*(list(self._item(*item)) for item in items)):
            yield "".join(parts)

    def _item(self, op: Any, value: Any) -> Iterator[str]:
        name = str(op)
        if name == "LITERAL":
            yield chr(value)
        elif name == "ANY" or (name == "IN" and str(value[0][0]) == "NEGATE"):
            yield from self.dot
        elif name == "IN":
            for kind, inner in value:
                codes = [inner] if str(kind) == "LITERAL" else range(inner[0], inner[1] + 1)
                yield from map(chr, codes)
        elif name == "BRANCH":
            for branch in value[1]:
                yield from self._sequence(list(branch))
        elif name == "SUBPATTERN":
            yield from self._sequence(list(value[3]))
        elif name == "MAX_REPEAT":
            least, most, inner = value
            for count in range(least, min(int(most), max(REPEATS, least)) + 1):
                yield from self._sequence(list(inner) * count)
        elif name != "AT":
            raise NotImplementedError(name)
        else:
            yield ""

    # -- schemas -----------------------------------------------------------------------------------------------------
    def values(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
        schema = {key: value for key, value in schema.items() if key not in self.dropped}
        kind = schema.get("type")
        if "$ref" in schema:
            yield from self.values(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
        elif "anyOf" in schema:
            for option in schema["anyOf"]:
                yield from self.values(option, root)
        elif "enum" in schema or "const" in schema:
            yield from schema.get("enum", [schema.get("const")])
        elif kind == "boolean":
            yield from (True, False)
        elif kind == "integer":
            yield from range(schema.get("minimum", -1), schema.get("maximum", 20) + 1)
        elif kind == "string":
            yield from self._strings(schema)
        elif kind == "array":
            items = list(self.values(schema.get("items", {"enum": [1, "x"]}), root))
            for count in range(schema.get("minItems", 0), schema.get("maxItems", 3) + 1):
                yield from map(list, itertools.product(items, repeat=count))
        elif kind == "object":
            yield from self._objects(schema, root)
        else:
            yield from (0, "x", None)

    def _strings(self, schema: Mapping[str, Any]) -> Iterator[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength", 3)
        texts = self.matches(schema["pattern"]) if "pattern" in schema else self.matches("[abx]{0,3}")
        yield from (text for text in texts if least <= len(text) <= most)

    def _objects(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        properties = dict(schema.get("properties", {"a": {"enum": [1]}}))
        if schema.get("additionalProperties", True) is not False:
            properties["b"] = properties.get("b", {"enum": [1]})
        required = schema.get("required", ())
        for names in itertools.product(*([True] if name in required else [True, False] for name in properties)):
            there = [name for name, taken in zip(properties, names, strict=True) if taken]
            for values in itertools.product(*(list(self.values(properties[name], root)) for name in there)):
                yield dict(zip(there, values, strict=True))
