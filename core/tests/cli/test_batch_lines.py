"""The lines of a batch are read, or refused by number and key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.batch_lines import BadLine, Line, choose_format, parse_lines


@pytest.mark.parametrize(
    ("path", "text", "form"),
    [
        ("a.jsonl", "plain", "jsonl"),
        ("a.NDJSON", "plain", "jsonl"),
        ("a.txt", '{"prompt": "x"}\n', "jsonl"),
        ("-", "\n\n  {}  \n", "jsonl"),
        ("a.txt", "{not json\n", "text"),
        ("-", "12\n", "text"),
        ("-", "", "text"),
    ],
)
def test_the_format_is_found_out(path, text, form):
    assert choose_format(path, text) == form


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_every_line_of_text_that_is_not_blank_is_a_prompt(texts):
    lines = parse_lines("\n".join(texts), "text")
    expected = [(n, t.removesuffix("\r")) for n, t in enumerate(texts, start=1) if t.strip()]
    assert [(line.number, line.prompt) for line in lines] == expected


def test_the_forms_of_json():
    messages = [{"role": "user", "content": "Hi"}]
    texts = [
        json.dumps({"prompt": "a", "id": [1], "temperature": 0.5, "n": 2}),
        "",
        json.dumps({"messages": messages, "stop": "x", "prompt": None}),
        json.dumps({"prompt_token_ids": [1, 2]}),
    ]
    assert parse_lines("\n".join(texts), "jsonl") == [
        Line(1, [1], "a", None, {"temperature": 0.5, "n": 2}),
        Line(3, None, None, messages, {"stop": "x"}),
        Line(4, None, [1, 2]),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "line 2; it is not valid JSON"),
        ("[1]", "line 2; it is a JSON list, not an object"),
        ('{"prompt": "a", "temperatur": 1}', "line 2; there is no key 'temperatur'; did you mean 'temperature'?"),
        ('{"prompt": "a", "detokenize": false}', "line 2; there is no key 'detokenize'"),
        ('{"id": 1}', "line 2; it has none of prompt, prompt_token_ids, messages"),
        ('{"prompt": "a", "messages": []}', "line 2; it has prompt and messages"),
        ('{"prompt": 3}', "line 2; prompt=3 is not a string"),
        ('{"prompt_token_ids": [true]}', "is not a list of integers"),
        ('{"messages": "hi"}', "line 2; messages='hi' is not a list"),
    ],
)
def test_a_bad_line_says_which_and_why_and_the_others_stand(text, says):
    first, bad, last = parse_lines('{"prompt": "a"}\n' + text + '\n{"prompt": "b"}\n', "jsonl")
    assert isinstance(first, Line) and isinstance(last, Line)
    assert isinstance(bad, BadLine) and bad.number == 2 and says in str(bad.error)
