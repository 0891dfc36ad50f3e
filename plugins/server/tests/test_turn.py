"""What tools and thoughts change about a request's sampling parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.types.params import SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_parsers.reasoning_parsers.card import Qwen3
from engine_parsers.reasoning_parsers.think import Qwen3Parser
from engine_parsers.tool_parsers.card import Hermes, Mistral
from engine_parsers.tool_parsers.hermes import HermesText
from engine_server.conversation.tool_constraint import Plan
from engine_server.conversation.turn import after_thoughts, with_tools

CONSTRAINT = StructuredOutputsParams(json_object=True, asked_as="tools")


def state(parser: Any = Hermes) -> Any:
    engine = SimpleNamespace(
        calls_hold_special_tokens=parser.reads_special_tokens,
        thought_marks=(Qwen3.begin, Qwen3.end),
        reasoning_parser=Qwen3Parser(None),
        tokenizer=SimpleNamespace(encode=lambda text, add_special_tokens: [len(text), int(add_special_tokens)]),
    )
    return SimpleNamespace(engine=engine)


def test_special_tokens_are_shown_where_calls_begin_with_some() -> None:
    plan, params = Plan(HermesText), SamplingParams()
    assert with_tools(params, plan, state()).skip_special_tokens
    assert not with_tools(params, plan, state(Mistral)).skip_special_tokens
    asked = with_tools(params, plan, state(Mistral), special_tokens_set=True)
    assert asked.skip_special_tokens, "the client's word counts"
    assert with_tools(params, Plan(), state(Mistral)) == params


def test_the_plans_constraint_is_the_requests() -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    for params in (SamplingParams(), asked):
        assert with_tools(params, Plan(HermesText, CONSTRAINT), state()).structured_outputs == CONSTRAINT
    assert with_tools(asked, Plan(), state()) == asked, "nothing is called"


def test_a_constraint_waits_for_thoughts_that_the_prompt_has_opened() -> None:
    params = SamplingParams(structured_outputs=CONSTRAINT)
    later = after_thoughts(params, state(), "assistant\n<think>\n").structured_outputs
    assert later is not None and later.start_after == [len("</think>"), 0] and later.json_object
    assert after_thoughts(params, state(), "assistant\n") == params and CONSTRAINT.start_after is None
    assert after_thoughts(SamplingParams(), state(), "<think>") == SamplingParams()
