"""Conversations to replay: read from a file, or drawn.

Two forms are read, as one JSON list or as a JSON object a line, also mixed:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}, ...]}      (ShareGPT)
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, ...],
     "think_times": [0.5, 2]}                                                                           (plain)

What users and the system say is taken; answers are the server's own, since they make the next prompt. `think_times`,
which may be left out, are the seconds before each turn but the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.types.errors import ConfigError
from engine_bench.workload import Lengths

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "system": "system"}  # fmt: skip
"""ShareGPT's names and the usual ones."""
SYLLABLES = ("ba", "de", "fi", "go", "lu", "mar", "nes", "pol", "ri", "son", "ta", "vel")


@dataclass(frozen=True)
class Conversation:
    """What one user says.

    Args:
        system: what the system says, "" for nothing.
        turns: what the user says, at least once.
        think_times: seconds before each turn but the first; None: they are drawn.
    """

    system: str
    turns: list[str]
    think_times: list[float] | None = None


def read_conversations(path: str, most: int) -> list[Conversation]:
    """The first conversations of a file; those in which no user speaks are passed over.

    Raises ConfigError for a file that cannot be read, is of another form, or has none.
    """
    flag = f"--conversations {path}"
    found: list[Conversation] = []
    try:
        text = Path(path).read_text(encoding="utf-8")
        for place, entry in _entries(text):
            conversation = _read(entry, f"{flag}, {place}")
            if conversation.turns:
                found.append(conversation)
            if len(found) == most:
                break
    except (OSError, ValueError) as error:
        raise ConfigError(
            flag, f"{type(error).__name__}: {error}", "name a file of JSON, or of a JSON object a line"
        ) from error
    if not found:
        raise ConfigError(flag, "no user speaks in it", "see the forms in the documentation")
    return found


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        yield from ((f"entry {i}", entry) for i, entry in enumerate(json.loads(text)))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"line {number}", json.loads(line)


def _read(entry: Any, place: str) -> Conversation:
    """One entry. An answer before the first turn, as some of ShareGPT's have, is left out; turns without an answer
    between them are one."""
    wrong = ConfigError(
        place, "it is neither of the forms that are read", 'write {"messages": [{"role", "content"}, ...]}'
    )
    if not isinstance(entry, dict):
        raise wrong
    messages = entry.get("messages", entry.get("conversations"))
    if not isinstance(messages, list):
        raise wrong
    system, turns, answered = "", list[str](), True
    for message in messages:
        if not isinstance(message, dict):
            raise wrong
        role, content = (
            ROLES.get(str(message.get("role", message.get("from")))),
            message.get("content", message.get("value")),
        )
        if role is None or not isinstance(content, str):
            raise wrong
        if role == "system":
            system = f"{system}\n{content}".strip()
        elif role == "assistant":
            answered = True
        elif answered:
            turns.append(content)
            answered = False
        else:
            turns[-1] += f"\n{content}"
    return Conversation(system, turns, _think_times(entry.get("think_times"), len(turns), place))


def _think_times(given: Any, turns: int, place: str) -> list[float] | None:
    if given is None:
        return None
    valid = isinstance(given, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e6 for value in given
    )
    if not valid or len(given) != max(turns - 1, 0):
        raise ConfigError(
            place,
            f"its think_times are no {max(turns - 1, 0)} times",
            "give the seconds before each turn but the first",
        )
    return [float(value) for value in given]


def draw_conversations(
    count: int, turns: Lengths, words: Lengths, system_prompts: int, system_words: int, seed: int
) -> list[Conversation]:
    """`count` conversations of made-up words, the same for the same arguments.

    Args:
        turns: how many there are in each.
        words: of each turn.
        system_prompts: how many different ones there are; each conversation has one of them. 0: none has any.
        system_words: of each system prompt.
        seed: of all draws.
    """
    random = np.random.default_rng(seed)

    def say(count: int) -> str:
        chosen = random.integers(0, len(SYLLABLES), (count, 2))
        return " ".join(SYLLABLES[a] + SYLLABLES[b] for a, b in chosen.tolist())

    systems = [say(system_words) for _ in range(system_prompts)] or [""]
    drawn = []
    for _ in range(count):
        system = systems[int(random.integers(len(systems)))]
        lengths = random.integers(
            words.low, words.high, int(random.integers(turns.low, turns.high, endpoint=True)), endpoint=True
        )
        drawn.append(Conversation(system, [say(length) for length in lengths.tolist()]))
    return drawn
