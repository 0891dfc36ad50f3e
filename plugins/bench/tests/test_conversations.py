"""Conversations for replays: what is read, and what is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.types.errors import ConfigError
from engine_bench.conversations import Conversation, draw_conversations, read_conversations
from engine_bench.workload import Lengths

SHARE = {
    "conversations": [
        {"from": "gpt", "value": "0"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "b"},
        {"from": "human", "value": "c"},
    ]
}
PLAIN = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "b"},
    ],
    "think_times": [2],
}
SILENT = {"messages": [{"role": "assistant", "content": "1"}]}


@pytest.mark.parametrize("form", ["list", "lines"])
def test_both_forms(tmp_path: Path, form: str) -> None:
    entries = [SHARE, SILENT, PLAIN, SHARE]
    file = tmp_path / "talks"
    file.write_text(json.dumps(entries, indent=1) if form == "list" else "\n\n".join(map(json.dumps, entries)))
    found = read_conversations(str(file), 2)
    assert found == [Conversation("", ["a", "b\nc"]), Conversation("s", ["a", "b"], [2.0])]
    assert len(read_conversations(str(file), 100)) == 3


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "neither of the forms"),
        ({"text": "a"}, "neither of the forms"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "line 1; it is neither"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "neither of the forms"),
        ({**PLAIN, "think_times": [1, 2]}, "no 1 times"),
        ({**PLAIN, "think_times": [-1]}, "no 1 times"),
        ({**PLAIN, "think_times": "1"}, "no 1 times"),
        (SILENT, "no user speaks"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, entry: Any, words: str) -> None:
    file = tmp_path / "talks"
    file.write_text(json.dumps(entry))
    with pytest.raises(ConfigError, match=words):
        read_conversations(str(file), 5)


def test_no_json(tmp_path: Path) -> None:
    file = tmp_path / "talks"
    file.write_text("hello")
    with pytest.raises(ConfigError, match="talks; JSONDecodeError"):
        read_conversations(str(file), 5)


def test_drawn_ones_are_the_same_for_a_seed_and_share_system_prompts() -> None:
    def draw(seed: int, system_prompts: int = 3) -> list[Conversation]:
        return draw_conversations(40, Lengths(2, 5), Lengths(3, 9), system_prompts, 6, seed)

    drawn = draw(1)
    assert drawn == draw(1) != draw(2)
    assert {len(one.turns) for one in drawn} == {2, 3, 4, 5}
    assert {len(turn.split()) for one in drawn for turn in one.turns} == set(range(3, 10))
    assert len({one.system for one in drawn}) == 3 and all(len(one.system.split()) == 6 for one in drawn)
    assert {one.system for one in draw(1, 0)} == {""}
