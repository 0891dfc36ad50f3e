"""The tool parsers, at every split point of every sample."""

from __future__ import annotations

import json
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_drives import TOOLS, events, joined, parser, shown_at_once
from parser_samples import MALFORMED, SAMPLES, Sample

from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta, ToolParserNeed
from engine.plugin import Registry
from engine_kit.tool_text import whole
from engine_sdk.conformance.parsing import operations

NAMES = sorted(SAMPLES)
EACH = [pytest.param(name, sample, id=f"{name}-{i}") for name in NAMES for i, sample in enumerate(SAMPLES[name])]
each_driver = pytest.mark.parametrize("name", NAMES)


def cuts(text: str) -> list[list[str]]:
    """The text in two pieces, cut at each place; and in single characters."""
    return [[text[:k], text[k:]] for k in range(len(text) + 1)] + [list(text)]


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_samples(name: str, sample: Sample) -> None:
    content, calls = whole(events(parser("tool_parser", name), [sample.text]))
    assert content == sample.content
    assert [(call.name, json.loads(call.arguments)) for call in calls] == list(sample.calls)


@pytest.mark.parametrize(("name", "sample"), EACH)
def test_every_cut_tells_the_same(name: str, sample: Sample) -> None:
    body = parser("tool_parser", name)
    expected = events(body, [sample.text])
    for pieces in cuts(sample.text):
        assert events(body, pieces) == expected, pieces


@each_driver
def test_malformed_text_is_content(name: str) -> None:
    body = parser("tool_parser", name)
    for text in MALFORMED[name]:
        for around in (text, f"Well. \n{text}"):
            expected = events(body, [around])
            assert whole(expected) == (around, []), around
            for pieces in cuts(around):
                assert events(body, pieces) == expected, pieces


@each_driver
def test_every_beginning_and_every_slip_loses_nothing(name: str) -> None:
    """Cut off, or with a stray character anywhere: what is no call is there as content, to the last character; and a
    client that was told of a call as it came has seen the rest."""
    body, random_ = parser("tool_parser", name), random.Random(4)
    for sample in SAMPLES[name]:
        text = sample.text
        for k in range(len(text)):
            for bad in (text[:k], text[:k] + random_.choice("@}{\"',<[)\\") + text[k:]):
                told = events(body, [bad])
                assert told == events(body, bad), bad
                content, calls = whole(told)
                for call in calls:
                    assert isinstance(json.loads(call.arguments), dict)
                if not calls:
                    assert content == bad
                shown, _ = shown_at_once(told)
                broken = [event for event in told if isinstance(event, BrokenCall)]
                assert bool(broken) == (shown != content) or all(not b.text for b in broken)


@each_driver
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces(name: str, data: st.DataObject) -> None:
    """Shreds of the form in any order: the same is told whatever the pieces; without a call all is content."""
    body = parser("tool_parser", name)
    shreds = sorted({text[i : i + 9] for s in SAMPLES[name] for text in [s.text] for i in range(0, len(text), 5)})
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(shreds), st.text(max_size=3)), max_size=25)))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    told = events(body, pieces)
    assert told == events(body, [text])
    content, calls = whole(told)
    assert calls or content == text


@each_driver
def test_calls_are_told_as_they_come(name: str) -> None:
    """Long arguments come in many pieces, the name before them, each piece as soon as it is there."""
    registry = Registry.discover()
    written = registry.card(registry.find("tool_parser", name)).write([("get_weather", {"city": "x" * 5000})])
    stream, given_out = parser("tool_parser", name).stream(TOOLS), []
    for i in range(0, len(written), 50):
        given_out.append([e for e in stream.push(written[i : i + 50]) if isinstance(e, ToolCallDelta)])
    deltas = [event for told in given_out for event in told]
    assert deltas[0].name == "get_weather" and not any(delta.name for delta in deltas[1:])
    assert sum(bool(told) for told in given_out) > 90
    assert stream.finish() == [] and deltas[-1].complete


def adversaries(name: str, size: int) -> list[str]:
    """Long texts that make slow parsers look back: unfinished forms, markers without end, blanks, one endless part."""
    sample = max((s.text for s in SAMPLES[name] if s.calls), key=len)
    openers = sorted(MALFORMED[name], key=len)[:6]
    shapes = [opener * (size // len(opener)) for opener in openers]
    shapes += [sample * (size // len(sample)), "<" * size, " " * size, "[" * size, "{" * size, "\\" * size, '"' * size]
    shapes += [opener + filler * size for opener in openers for filler in ('"', " ", "1", "a")]
    registry = Registry.discover()
    card = registry.card(registry.find("tool_parser", name))
    shapes += [card.write([("save", {"rows": ["x" * size]})]), card.write([("save", {"rows": [[]] * (size // 4)})])]
    return shapes


PER_CHARACTER = 60
"""Operations that a character may cost, pieces of sixteen characters and what they cost included."""


@each_driver
@pytest.mark.parametrize("size", [2000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_time_is_linear(name: str, size: int) -> None:
    """Counted, not timed: no text costs more than so much a character, whatever came before."""
    texts = adversaries(name, size)
    for text in texts if size < 10_000 else texts[::9]:  # counting slows down thirty times
        stream = parser("tool_parser", name).stream(TOOLS)

        def work(stream=stream, text=text) -> None:
            for i in range(0, len(text), 16):
                stream.push(text[i : i + 16])
            stream.finish()

        assert operations(work) < PER_CHARACTER * len(text) + 2000, text[:40]


def test_long_pieces_are_linear_too() -> None:
    """Long pieces, too: ten times the text costs ten times the lines, not a hundred."""
    for name in NAMES:
        for small, large in zip(adversaries(name, 1000), adversaries(name, 10_000), strict=True):
            costs = []
            for text in (small, large):
                stream = parser("tool_parser", name).stream(TOOLS)
                costs.append(lines(lambda stream=stream, text=text: (stream.push(text), stream.finish())))
            assert costs[1] < 12 * costs[0] + 500, (name, small[:40], costs)


def lines(work) -> int:
    """Lines of Python that it takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def test_streams_know_nothing_of_each_other() -> None:
    for name in NAMES:
        body = parser("tool_parser", name)
        first, second = body.stream(TOOLS), body.stream(TOOLS)
        text = SAMPLES[name][0].text
        told = [e for c in text for e in first.push(c)]
        other = [e for c in text for e in second.push(c)]
        assert joined([*told, *first.finish()]) == joined([*other, *second.finish()]) == events(body, [text])


def test_ids_of_mistral() -> None:
    """Nine letters or digits, which its templates insist on; the model's own where it writes one."""
    body = parser("tool_parser", "mistral")
    (call,) = whole(body.stream(TOOLS).push("[TOOL_CALLS]now[ARGS]{}"))[1]
    assert len(call.call_id) == 9 and call.call_id.isalnum()
    (call,) = whole(body.stream(TOOLS).push("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}"))[1]
    assert call.call_id == "a1B2c3D4e"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ('{{ "<tool_call>" + arguments }}', "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y> arguments", "qwen"),
        ("<tool_call>{name}\n<arg_key> arguments", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|im_start|>", None),
        ("", None),
    ],
)
def test_templates_are_recognised_by_one(template: str, expected: str | None) -> None:
    registry = Registry.discover()
    need = ToolParserNeed(chat_template=template)
    found = [name for name in NAMES if registry.card(registry.find("tool_parser", name)).recognises(need)]
    assert found == ([expected] if expected else [])
