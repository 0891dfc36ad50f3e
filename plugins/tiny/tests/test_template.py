"""Training reads exactly the text that serving renders."""

import itertools
import json

import pytest

from engine_tiny import model_folder
from engine_tiny.corpus import chat
from engine_tiny.layout import BOS, IM_END, IM_START
from engine_tiny.render import Encoder, document_text, render
from engine_tiny.tokenizer import load_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
        },
    },
}


def call(arguments) -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
    }


def test_a_whole_tool_conversation():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Paris?"}]},
        call({"city": "Paris"}),
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    assert render(messages, [WEATHER], add_generation_prompt=True) == (
        f"{BOS}{IM_START}system\nBe brief.\n<tools>\n"
        f"get_weather(city: string, unit) Get the weather.\n</tools>{IM_END}\n"
        f"{IM_START}user\nWeather in Paris?{IM_END}\n"
        f'{IM_START}assistant\n<tool_call>{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}'
        f"</tool_call>{IM_END}\n"
        f"{IM_START}tool\nsunny{IM_END}\n{IM_START}assistant\n"
    )


def test_arguments_as_text_and_as_an_object_render_alike():
    assert render([call({"city": "São"})]) == render([call(json.dumps({"city": "São"}, ensure_ascii=False))])


@pytest.mark.parametrize("tool", [{"name": "now"}, {"type": "function", "function": {"name": "now", "parameters": {}}}])
def test_a_tool_without_parameters(tool):
    assert "<tools>\nnow()\n</tools>" in render([{"role": "user", "content": "?"}], [tool])


def test_targets_are_what_the_assistant_says():
    encoder = Encoder(load_tokenizer(model_folder()))
    for document in itertools.islice(chat.documents(1, "train"), 100):
        ids, targets = encoder.document(document)
        said = encoder.tokenizer.decode([i for i, wanted in zip(ids, targets, strict=True) if wanted])
        for message in document.messages:
            if message["role"] == "assistant" and message["content"]:
                assert message["content"] in said


def test_a_prompt_is_the_beginning_of_its_document():
    encoder = Encoder(load_tokenizer(model_folder()))
    for document in itertools.islice(chat.documents(2, "train"), 100):
        if document.messages:
            ids, _ = encoder.document(document)
            prompt = encoder.prompt(document.messages[:-1], document.tools)
            assert ids[: len(prompt)] == prompt


def test_transformers_renders_the_same():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    for document in itertools.islice(chat.documents(3, "train"), 60):
        if document.messages:
            theirs = tokenizer.apply_chat_template(document.messages, tools=document.tools, tokenize=False)
            assert theirs == document_text(document)
