"""Completions told as a row of blocks, whole and as they come."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from engine_parsers.reasoning_parsers.think import Qwen3Parser
from engine_parsers.tool_parsers.hermes import HermesText
from engine_server.conversation.completion import Blocks, CompletionReader

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
CUT = '<tool_call>{"name": "f", "arguments": {"a": [1, '
PARTS = ("<think>\nHm.\n</think>\n\n", "Let me see.", "\n", " ", CALL, OTHER, CUT, "<tool_call>no</tool_call>", "é\n")


def blocks(*, parallel: bool = True) -> Blocks:
    return Blocks(CompletionReader(Qwen3Parser(None).stream(""), HermesText(), parallel))


def streamed(text: str, cuts: list[int]) -> tuple[Blocks, list[tuple[str, str]]]:
    """By pieces; and what a client puts together from the news, which also have to come in order."""
    made, seen, open_ = blocks(), [], False
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    for i, (start, end) in enumerate(zip(places, places[1:] or [len(text)], strict=False)):
        for news in made.push(text[start:end], i == max(0, len(places) - 2)):
            if news.step == "start":
                assert not open_ and news.block.index == len(seen)
                seen.append((news.block.kind, ""))
                open_ = True
            elif news.step == "more":
                assert open_ and news.block.index == len(seen) - 1 and news.text
                seen[-1] = (seen[-1][0], seen[-1][1] + news.text)
            else:
                assert open_ and news.block.index == len(seen) - 1
                open_ = False
    assert not open_
    return made, seen


def test_a_row() -> None:
    made = blocks()
    row = made.whole(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{OTHER}\n")
    assert [(block.kind, block.name) for block in row] == [("thoughts", ""), ("text", ""), ("call", "f"), ("call", "g")]
    assert row[0].text == "Hm." and row[1].text.strip() == "Let me see."
    assert json.loads(row[2].text) == {"a": [1, "x"]} and made.called


def test_white_space_alone_is_text_only_without_calls() -> None:
    assert [block.text for block in blocks().whole("\n ")] == ["\n "]
    assert [block.kind for block in blocks().whole(f"\n{CALL}\n")] == ["call"]
    assert [block.kind for block in blocks().whole(f"{CALL}\n and \n")] == ["call", "text"]
    assert blocks().whole("") == []


def test_a_call_that_is_cut_off() -> None:
    """Whole, it is text; streamed, it stays as it was told."""
    whole = blocks()
    assert [(block.kind, block.text) for block in whole.whole(CUT)] == [("text", CUT)] and not whole.called
    made, seen = streamed(CUT, list(range(len(CUT))))
    assert seen[0][0] == "call" and seen[0][1].startswith('{"a": [1') and not made.row[0].complete and not made.called


def test_only_the_first_call() -> None:
    assert [block.name for block in blocks(parallel=False).whole(CALL + OTHER)] == ["f"]


@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.lists(st.integers(0, 1000), max_size=8))
def test_pieces_are_the_whole(text: str, cuts: list[int]) -> None:
    made, seen = streamed(text, cuts)
    assert seen == [(block.kind, block.text) for block in made.row]
    if all(block.complete for block in made.row):
        assert seen == [(block.kind, block.text) for block in blocks().whole(text)]
