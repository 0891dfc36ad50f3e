"""How calls are made sure of, with grammar drivers that enforce more or less."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine.interfaces.grammar import GrammarCard
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.request_checks import ConstraintCheck
from engine_kit.tool_text import whole
from engine_parsers.tool_parsers.hermes import HermesParser
from engine_parsers.tool_parsers.mistral import MistralParser
from engine_parsers.tool_parsers.pythonic import PythonicParser
from engine_server.conversation.tool_constraint import plan_calls
from engine_server.conversation.tools import tool_request
from engine_server.errors import APIError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def grammar(*constraints: str, refuses: str = "") -> Any:
    class Card(GrammarCard):
        constraints_: ClassVar[frozenset[str]] = frozenset(constraints)

        @classmethod
        def verify(cls, constraint: Any) -> None:
            if refuses in constraint.kinds:
                raise InvalidRequestError("the schema", "no")

    Card.constraints = Card.constraints_
    chosen: Any = [
        SimpleNamespace(card=Card, candidate=SimpleNamespace(name="some"), kind=kind) for kind in constraints
    ]
    return ConstraintCheck(chosen)


def plan(
    choice: Any,
    driver: Any,
    parser: Any = HermesParser,
    parallel: bool | None = None,
    tools: Any = TOOLS,
    answer: StructuredOutputsParams | None = None,
) -> Any:
    return plan_calls(tool_request(tools, choice, parallel), parser(None) if parser else None, driver, answer)


def read(stream: Any, text: str) -> Any:
    return whole([*stream.push(text), *stream.finish()])


def test_nothing_is_enforced_that_need_not_come() -> None:
    assert plan("auto", grammar("json")).constraint is None
    with pytest.raises(APIError, match="--tool-call-parser") as caught:
        plan("auto", grammar("json"), None)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("parallel", [True, False])
def test_in_the_models_own_form(parallel: bool) -> None:
    made = plan("required", grammar("json", "structural_tag"), parallel=parallel)
    tag = json.loads(made.constraint.structural_tag)["format"]
    assert tag["type"] == "tags_with_separator" and tag["at_least_one"] and tag["stop_after_first"] is not parallel
    assert [t["begin"] for t in tag["tags"]] == [
        '<tool_call>{"name": "get_weather", "arguments": ',
        '<tool_call>{"name": "now", "arguments": ',
    ]
    assert tag["tags"][0]["content"]["json_schema"] == SCHEMA
    assert tag["tags"][1]["content"]["json_schema"]["additionalProperties"] is False
    written = tag["tags"][0]["begin"] + '{"city": "Rome"}' + tag["tags"][0]["end"]
    assert read(made.stream(), written) == ("", [("get_weather", '{"city": "Rome"}', "")])


def test_one_by_name() -> None:
    tag = json.loads(plan(NAMED, grammar("structural_tag")).constraint.structural_tag)["format"]
    assert [t["begin"] for t in tag["tags"]] == ['<tool_call>{"name": "get_weather", "arguments": ']
    assert tag["stop_after_first"]


@pytest.mark.parametrize("parser", [HermesParser, MistralParser, None])
def test_as_bare_json(parser: Any) -> None:
    """Without a form, a parser, or a grammar for structural tags."""
    made = plan("required", grammar("json"), parser)
    schema = made.constraint.json
    assert schema["minItems"] == 1 and "maxItems" not in schema and len(schema["items"]["anyOf"]) == 2
    text = '[{"name": "now", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Rome"}}]'
    content, calls = read(made.stream(), text)
    assert content == "" and [c[:2] for c in calls] == [("now", "{}"), ("get_weather", '{"city": "Rome"}')]
    assert plan("required", grammar("json"), parser, parallel=False).constraint.json["maxItems"] == 1
    named = plan(NAMED, grammar("json"), parser)
    assert named.constraint.json == SCHEMA
    assert read(named.stream(), ' {"city": "Rome"}') == ("", [("get_weather", '{"city": "Rome"}', "")])
    assert read(named.stream(), '{"city": "Ro') == ('{"city": "Ro', [])


def test_what_is_defined_moves_to_the_whole() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    made = plan("required", grammar("json"), None, tools=tools).constraint.json
    assert made["$defs"] == {"A": {"type": "string"}}
    assert "$defs" not in made["items"]["properties"]["parameters"] and "$defs" in schema


def test_a_grammar_that_refuses_one_form_may_take_the_other() -> None:
    driver = grammar("json", "structural_tag", refuses="structural_tag")
    assert plan("required", driver).constraint.kinds == ["json"]
    with pytest.raises(APIError, match=r"\('some'\) refuses: the schema; no") as caught:
        plan("required", grammar("json", refuses="json"))
    assert caught.value.param == "tools"


def test_nobody_can_enforce_it() -> None:
    for choice in ("required", NAMED):
        with pytest.raises(APIError, match="enforces choice only.*engine-xgrammar") as caught:
            plan(choice, grammar("choice"))
        assert caught.value.param == "tool_choice" and caught.value.status == 400


def test_strict_tools_that_may_be_called() -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    made = plan("auto", grammar("structural_tag"), tools=tools)
    tag = json.loads(made.constraint.structural_tag)["format"]
    assert (tag["type"], tag["triggers"], tag["at_least_one"]) == ("triggered_tags", ["<tool_call>"], False)
    assert [t["content"]["json_schema"] for t in tag["tags"]] == [SCHEMA, {"type": "object"}]
    for driver, parser in ((grammar("json"), HermesParser), (grammar("structural_tag"), MistralParser)):
        with pytest.raises(APIError, match="strict") as caught:
            plan("auto", driver, parser, tools=tools)
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("asked", "format_"),
    [
        ({"json": SCHEMA}, {"type": "json_schema", "json_schema": SCHEMA}),
        ({"json": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": SCHEMA}),
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"grammar": "root ::= x"}, {"type": "grammar", "grammar": "root ::= x"}),
        ({"choice": ["a"]}, {"type": "const_string", "value": "a"}),
        (
            {"choice": ["a", "b"]},
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}],
            },
        ),
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}, {"type": "any_text"}),
    ],
)
def test_an_answer_in_a_form_or_calls(asked: dict[str, Any], format_: dict[str, Any]) -> None:
    kind = next(iter(asked))
    answer = StructuredOutputsParams(**asked, asked_as="response_format")
    made = plan("auto", grammar("structural_tag", kind), answer=answer)
    tag = json.loads(made.constraint.structural_tag)["format"]
    assert tag["type"] == "or" and tag["elements"][0] == format_
    calls = tag["elements"][1]
    assert calls["type"] == "tags_with_separator" and calls["at_least_one"]
    assert [t["content"]["json_schema"] for t in calls["tags"]] == [{"type": "object"}] * 2, "none of them is strict"
    assert read(made.stream(), '{"city": "Rome"}') == ('{"city": "Rome"}', [])
    for choice in ("required", NAMED):
        assert (
            plan(choice, grammar("structural_tag", kind), answer=answer)[1]
            == plan(choice, grammar("structural_tag", kind))[1]
        ), "calls must come, and so no answer"


def test_an_answer_in_a_form_that_cannot_stand_beside_calls() -> None:
    answer = StructuredOutputsParams(json=SCHEMA, asked_as="response_format")
    old = StructuredOutputsParams(structural_tag='{"structures": [], "triggers": []}', asked_as="response_format")
    for driver, parser, what in (
        (grammar("json", "structural_tag"), PythonicParser, answer),
        (grammar("json"), HermesParser, answer),
        (grammar("json", "structural_tag"), HermesParser, old),
    ):
        with pytest.raises(APIError, match="response_format") as caught:
            plan("auto", driver, parser, answer=what)
        assert (caught.value.param, caught.value.status) == ("response_format", 400)
    for choice in ("auto", "required"):
        with pytest.raises(InvalidRequestError) as refused:
            plan(choice, grammar("json", "structural_tag", refuses="json"), answer=answer)
        assert refused.value.asked == "the schema"
