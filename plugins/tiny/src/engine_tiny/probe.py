"""Questions by kind, from the held-out split, and a quick look at how many are answered exactly.

If every token of a turn is the likeliest one given those before it, greedy decoding writes exactly this turn.
So one forward pass over the reference answers tells an exact match that generation reaches at least: it may also
write the same text in other tokens.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_tiny.corpus import arithmetic, extraction, facts, smalltalk, stories, tools
from engine_tiny.corpus.base import Document, Message, Split
from engine_tiny.layout import EOS, TOKEN_IDS
from engine_tiny.render import Encoder


@dataclass(frozen=True)
class Question:
    """A prompt up to where the assistant speaks, and the message that is expected."""

    kind: str
    messages: list[Message]
    expected: Message
    tools: list[dict[str, Any]] | None = None


def _tool_call(
    make: Callable[[random.Random, Split], tools.Case], kind: str
) -> Callable[[random.Random, Split], Question]:
    def question(rng: random.Random, split: Split) -> Question:
        case = make(rng, split)
        turns = tools.turns(case)
        return Question(kind, turns[:1], turns[1], tools.offer([case], rng, split))

    return question


def _tool_answer(rng: random.Random, split: Split) -> Question:
    case = tools.known_case(rng, split) if rng.random() < 0.5 else tools.unseen_case(rng, split)
    turns = tools.turns(case)
    return Question("tool answer", turns[:3], turns[3], tools.offer([case], rng, split))


def _plain(
    kind: str, make: Callable[[random.Random, Split], list[Message]]
) -> Callable[[random.Random, Split], Question]:
    def question(rng: random.Random, split: Split) -> Question:
        messages = make(rng, split)
        return Question(kind, messages[:-1], messages[-1])

    return question


def _memory(rng: random.Random, split: Split) -> Question:
    told, asked = smalltalk.memory(rng, split)
    return Question("memory", told + facts.exchange(rng, split) + asked[:1], asked[1])


KINDS: tuple[Callable[[random.Random, Split], Question], ...] = (
    _plain("facts", lambda rng, split: facts.never_asked(rng)),
    _plain("facts, follow-up", facts.follow_up),
    _plain("arithmetic", arithmetic.exchange),
    _plain("JSON extraction", extraction.exchange),
    _plain("reading", extraction.reading),
    _tool_call(tools.known_case, "tool call"),
    _tool_call(tools.unseen_case, "tool call, unseen tools"),
    _tool_answer,
    _plain("echo", smalltalk.echo),
    _memory,
    _plain("story questions", stories.questions),
)


def questions(count: int, seed: int = 4711) -> Iterator[Question]:
    """`count` of every kind; the same for the same seed."""
    for number, make in enumerate(KINDS):
        rng = random.Random(f"probe {seed} {number}")
        for _ in range(count):
            yield make(rng, "held_out")


@torch.inference_mode()
def exact_rates(model: torch.nn.Module, encoder: Encoder, count: int, rows: int = 32) -> dict[str, float]:
    """By kind, the share of expected answers that greedy decoding gives token for token."""
    by_kind: dict[str, list[bool]] = {}
    todo = []
    for question in questions(count):
        document = Document("probe", messages=[*question.messages, question.expected], tools=question.tools)
        ids, _ = encoder.document(document)
        todo.append((question.kind, ids, encoder.assistant_spans(ids)[-1]))
    todo.sort(key=lambda item: len(item[1]))
    for at in range(0, len(todo), rows):
        part = todo[at : at + rows]
        tokens = np.full((len(part), max(len(ids) for _, ids, _ in part)), TOKEN_IDS[EOS], dtype=np.int64)
        for row, (_, ids, _) in enumerate(part):
            tokens[row, : len(ids)] = ids
        with torch.autocast("cpu", dtype=torch.bfloat16):
            best = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.argmax(-1).numpy()
        for row, (kind, ids, (start, end)) in enumerate(part):
            right = bool((best[row, start - 1 : end - 1] == np.array(ids[start:end])).all())
            by_kind.setdefault(kind, []).append(right)
    return {kind: sum(right) / len(right) for kind, right in by_kind.items()}
