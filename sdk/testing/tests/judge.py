"""Whether texts fit the schemas of the suite's table: by looking there, and by a validator for altered schemas.

`Judged` takes any text and judges it where it ends: enough for a suite that asks about whole texts, and to be broken.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema

from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import normalised
from engine_sdk.conformance.grammar.cases import CASES, vocabulary
from engine_sdk.conformance.grammar.decoding import decoded
from engine_sdk.conformance.grammar.parts import HELD
from engine_sdk.conformance.grammar.values import Held

PIECES = vocabulary()
WITH_SCHEMAS = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
WITH_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
WITH_NAMES = ("properties", "patternProperties", "$defs", "dependentSchemas")


@functools.cache
def table() -> Mapping[str, Sequence[Held]]:
    """The suite's table by normalised schema, without those of its cases, which
    `plain_grammar` lists. Several schemas may come to the same."""
    cases = {json.dumps(normalised(case.constraint).schema) for case in CASES if case.kind == "json"}
    found: dict[str, list[Held]] = {}
    for held in itertools.chain(*HELD.values()):
        try:
            key = json.dumps(normalised(StructuredOutputsParams(json=json.dumps(held.schema))).schema)
        except InvalidRequestError:
            continue
        if key not in cases:
            found.setdefault(key, []).append(held)
    return found


def canonical(value: Any) -> str:
    """One text for all values that JSON calls equal."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(of_name) for name, of_name in part.items()}
        if isinstance(part, list):
            return [plain(item) for item in part]
        return int(part) if isinstance(part, float) and part == int(part) else part

    return json.dumps(plain(value), sort_keys=True)


def fits(held: Held, text: str) -> bool:
    """Whether a text is one of an entry's valid instances."""
    try:
        return canonical(decoded(text)) in map(canonical, held.valid)
    except ValueError:
        return False


def valid(schema: Any, instance: Any) -> bool:
    """What a validator says."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(instance))


Rule = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]
"""A schema that is no bool, and the keywords that it stands behind, to what it is read as."""


def altered(schema: Any, rule: Rule, behind: tuple[str, ...] = ()) -> Any:
    """A schema with each schema in it, itself among them, as the rule has it."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, part in schema.items():
        within = (*behind, key)
        if key in WITH_SCHEMAS:
            part = altered(part, rule, within)
        elif key in WITH_LISTS:
            part = [altered(item, rule, within) for item in part]
        elif key in WITH_NAMES:
            part = {name: altered(of_name, rule, within) for name, of_name in part.items()}
        found[key] = part
    return rule(found, behind)


class Judged:
    """See `engine.interfaces.grammar.Matcher`. Takes every token, and the end where `judge` says that the text fits."""

    def __init__(self, judge: Callable[[str], bool], ends: Sequence[int]) -> None:
        self._judge = judge
        self._ends = ends
        self._tokens = list[int]()

    @property
    def finished(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._ends

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self.finished or (token in self._ends and not self._judge(self._text())):
                return count
            self._tokens.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._tokens[-num_tokens:]

    def forced_bytes(self) -> bytes:
        return b""

    def _text(self) -> str:
        return b"".join(PIECES[token] or b"" for token in self._tokens).decode()
