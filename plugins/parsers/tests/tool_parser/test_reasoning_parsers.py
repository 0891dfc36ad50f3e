"""The reasoning parsers, at every split point of every sample."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_drives import parser

from engine.interfaces.reasoning_parser import ReasoningDelta
from engine_sdk.conformance.parsing import operations

# driver, end of the prompt, text, thoughts, answer
SAMPLES = [
    ("qwen3", "assistant\n", "<think>\nHm.\n\nSo.\n</think>\n\nYes. \n", "Hm.\n\nSo.", "Yes. \n"),
    ("qwen3", "assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", " Yes.", "", " Yes."),
    ("qwen3", "assistant\n", "Yes, <think> is a tag, </think> too.", "", "Yes, <think> is a tag, </think> too."),
    ("qwen3", "assistant\n", "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("qwen3", "assistant\n", "<think>Hm. </thin", "Hm. </thin", ""),
    ("qwen3", "assistant\n", "<thi", "", "<thi"),
    ("qwen3", "assistant\n", "", "", ""),
    ("deepseek_r1", "<think>\n", "Hm.\n</think>\n\nYes.</think>", "Hm.", "Yes.</think>"),
    ("deepseek_r1", "", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("deepseek_r1", "", "Hm, a < b, no end", "Hm, a < b, no end", ""),
    ("deepseek_r1", "</think>", "\nYes.", "", "Yes."),
    ("deepseek_r1", "", "Hm.</think>", "Hm.", ""),
]


def told(name: str, prompt: str, pieces: list[str]) -> ReasoningDelta:
    stream = parser("reasoning_parser", name).stream(prompt)
    deltas = [*map(stream.push, pieces), stream.finish()]
    answered = False
    for delta in deltas:
        assert not (answered and delta.reasoning), "thoughts after the answer"
        answered = answered or bool(delta.content)
    return ReasoningDelta("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas))


@pytest.mark.parametrize(("name", "prompt", "text", "thoughts", "answer"), SAMPLES)
def test_every_cut(name: str, prompt: str, text: str, thoughts: str, answer: str) -> None:
    for k in range(len(text) + 1):
        assert told(name, prompt, [text[:k], text[k:]]) == (thoughts, answer), k
    assert told(name, prompt, list(text)) == (thoughts, answer)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("prompt", ["", "<think>\n", "</think>\n\n"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces(name: str, prompt: str, data: st.DataObject) -> None:
    parts = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "<"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    whole = told(name, prompt, [text])
    assert told(name, prompt, list(text)) == whole
    kept, given_ = (Counter("".join(t.split())) for t in (whole.reasoning + whole.content, text))
    tags = Counter("<think></think>")
    assert kept <= given_ and given_ - kept <= tags, "nothing is lost but the tags and the white space beside them"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("size", [4000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_time_is_linear(name: str, size: int) -> None:
    for shape in ("<", " ", "<think>", "</think", "</thin ", "a "):
        text = shape * (size // len(shape))
        stream = parser("reasoning_parser", name).stream("")

        def work(stream=stream, text=text) -> None:
            for i in range(0, len(text), 16):
                stream.push(text[i : i + 16])
            stream.finish()

        assert operations(work) < 60 * len(text) + 2000, shape
