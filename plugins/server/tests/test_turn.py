"""What tools and thoughts change about a request's sampling parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.types.params import SamplingParams, ThinkingBudget
from engine.types.structured_outputs import StructuredOutputsParams
from engine_parsers.reasoning_parsers.card import Qwen3
from engine_parsers.reasoning_parsers.think import Qwen3Parser
from engine_parsers.tool_parsers.card import Hermes, Mistral
from engine_parsers.tool_parsers.hermes import HermesText
from engine_server.conversation.tool_constraint import Plan
from engine_server.conversation.turn import constrained

CONSTRAINT = StructuredOutputsParams(json_object=True, asked_as="tools")


def state(parser: Any = Hermes) -> Any:
    engine = SimpleNamespace(
        calls_hold_special_tokens=parser.reads_special_tokens,
        thought_marks=(Qwen3.begin, Qwen3.end),
        reasoning_parser=Qwen3Parser(None),
        inputs=SimpleNamespace(tokenizer_of=tokenizer_of),
    )
    return SimpleNamespace(engine=engine, adapters=SimpleNamespace(get=lambda name: name))


def tokenizer_of(adapter: str | None) -> Any:
    more = [] if adapter is None else [1000]
    return SimpleNamespace(encode=lambda text, add_special_tokens: [len(text), int(add_special_tokens), *more])


ANSWER, THOUGHTS = "assistant\n", "assistant\n<think>\n"
"""How a prompt ends before one of them."""
END, BEGIN = [len("</think>"), 0], [len("<think>"), 0]


def test_special_tokens_are_shown_where_calls_begin_with_some() -> None:
    plan, params = Plan(HermesText), SamplingParams()
    assert constrained(params, plan, state(), ANSWER).skip_special_tokens
    assert not constrained(params, plan, state(Mistral), ANSWER).skip_special_tokens
    asked = constrained(params, plan, state(Mistral), ANSWER, special_tokens_set=True)
    assert asked.skip_special_tokens, "the client's word counts"
    assert constrained(params, Plan(), state(Mistral), ANSWER) is params


def test_the_plans_constraint_is_the_requests() -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    for params in (SamplingParams(), asked):
        planned = constrained(params, Plan(HermesText, CONSTRAINT), state(), ANSWER)
        assert planned.structured_outputs == CONSTRAINT
    assert constrained(asked, Plan(HermesText), state(), ANSWER).structured_outputs is None
    assert constrained(asked, Plan(), state(), ANSWER) is asked, "nothing is called"


def test_a_constraint_waits_for_thoughts_that_the_prompt_has_opened() -> None:
    params = SamplingParams(structured_outputs=CONSTRAINT)
    for plan, one in ((Plan(), params), (Plan(HermesText, CONSTRAINT), SamplingParams())):
        later = constrained(one, plan, state(), THOUGHTS).structured_outputs
        assert later is not None and later.start_after == END and later.json_object
    assert constrained(params, Plan(), state(), ANSWER) is params and CONSTRAINT.start_after is None
    assert constrained(SamplingParams(), Plan(), state(), "<think>") == SamplingParams()


def test_thoughts_end_within_a_budget() -> None:
    for prompt, begin in ((THOUGHTS, []), (ANSWER, BEGIN)):
        budget = constrained(SamplingParams(), Plan(), state(), prompt, 7).thinking_budget
        assert budget == ThinkingBudget(tokens=7, end=END, begin=begin)
    of_adapter = constrained(SamplingParams(), Plan(), state(), ANSWER, 7, model="own").thinking_budget
    assert of_adapter == ThinkingBudget(tokens=7, end=[*END, 1000], begin=[*BEGIN, 1000]), "by its own tokenizer"
