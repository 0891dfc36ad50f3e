"""The trained model, served by the engine, says what it should."""

import json

import pytest

from engine import LLM, SamplingParams
from engine_tiny.evaluate import parse_tool_calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def ask():
    llm = LLM(model="tiny")

    def answer(*messages: dict, tools: list | None = None) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=96)
        (output,) = llm.chat(list(messages), params, tools=tools, use_tqdm=False)
        return output.outputs[0].text

    yield answer
    llm.shutdown()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("What color is grass?", "green"),
        ("Which day comes after Monday?", "Tuesday"),
        ("What is 7 times 8?", "56"),
    ],
)
def test_facts(ask, question, word):
    assert word in ask(user(question))


def test_it_remembers_a_name(ask):
    messages = [user("My name is Anna."), {"role": "assistant", "content": "Nice to meet you, Anna!"}]
    assert "Anna" in ask(*messages, user("What is my name?"))


def test_it_extracts_json(ask):
    text = ask(user("Extract the name, age and city as JSON: Maria is 34 years old and lives in Lisbon."))
    assert json.loads(text) == {"name": "Maria", "age": 34, "city": "Lisbon"}


def test_it_calls_the_weather_and_tells_the_result(ask):
    question = user("What is the weather in Paris?")
    call = ask(question, tools=[WEATHER])
    assert parse_tool_calls(call) == [("get_weather", {"city": "Paris"})]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    told = ask(question, turn, {"role": "tool", "tool_call_id": "1", "content": "sunny, 21 degrees"}, tools=[WEATHER])
    assert "sunny" in told and "21" in told and "Paris" in told


def test_it_says_who_it_is(ask):
    assert ask(user("Who are you?")).startswith("I am Tiny")
