"""What every generator shares: messages, splits, and how one text is told to be held out."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 12


@dataclass(frozen=True)
class Document:
    """One training text: a plain one, or a conversation (with the tools it offers)."""

    kind: str
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


def is_held_out(text: str) -> bool:
    """By content, not by order: a text keeps its side whatever else the corpus becomes."""
    return zlib.crc32(text.lower().encode()) % HELD_OUT_ONE_IN == 0


def draw(make: Callable[[], str], split: Split, tries: int = 200) -> str:
    """Draw from `make` until the text belongs to `split`."""
    for _ in range(tries):
        text = make()
        if is_held_out(text) == (split == "held_out"):
            return text
    raise LookupError(f"nothing in {tries} tries belongs to {split!r}: last {text!r}")


def pick(rng: random.Random, options: Sequence[Any]) -> Any:
    return options[int(rng.random() * len(options))]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
