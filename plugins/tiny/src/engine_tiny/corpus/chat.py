"""Conversations out of exchanges: short ones, long ones, with and without tools on offer."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine_tiny.corpus import arithmetic, extraction, facts, smalltalk, stories, tools, words
from engine_tiny.corpus.base import Document, Message, Split, pick

Exchange = Callable[[random.Random, Split], list[Message]]
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Tiny, a helpful assistant.",
    "You are Tiny.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful AI assistant.",
    "Be concise.",
    "Answer the questions of the user.",
    "You are an assistant that answers in short sentences.",
    "You are a helpful assistant with access to tools.",
    "Use the tools when they help.",
)
EXCHANGES: tuple[Exchange, ...] = (
    facts.exchange, facts.follow_up, arithmetic.exchange, arithmetic.follow_up, smalltalk.exchange, smalltalk.echo,
    extraction.exchange, extraction.reading, stories.request, stories.questions, tools.no_tool_for_it,
    facts.yes_or_no, facts.unknown, facts.listing,
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """How much there is of what.

    Args:
        stories, texts, chats: upper bounds of a number drawn in [0, 1); above them, a conversation with tools.
        known: the share of requests, in conversations with tools, that are for the tools everybody knows.
        weights: of `EXCHANGES`, in their order.
    """

    stories: float
    texts: float
    chats: float
    known: float
    weights: tuple[float, ...]


MIXES = {
    "general": Mix(0.10, 0.14, 0.60, 0.45, (4, 1.5, 4, 1, 1.2, 1.3, 2.5, 1, 0.35, 0.3, 0.15, 0.6, 0.3, 0.5)),
    # Facts are learnt long before copying is: once they stand, the time goes to what is copied and counted.
    "copying": Mix(0.06, 0.08, 0.40, 0.28, (1.5, 0.8, 4, 1.2, 0.8, 2.2, 4.5, 0.8, 0.3, 0.3, 0.15, 0.3, 0.3, 0.2)),
}
BESIDE_TOOLS: tuple[Exchange, ...] = (facts.exchange, facts.exchange, smalltalk.exchange, extraction.exchange)
"""What is answered directly although tools are on offer (sums are not: a calculator may be among them)."""


def _system(rng: random.Random, chance: float) -> list[Message]:
    """Mostly none or a usual one; at times something long or odd, which must not put the model off."""
    if rng.random() >= chance:
        return []
    prompt = pick(rng, SYSTEM_PROMPTS)
    kind = rng.random()
    if kind < 0.15:
        prompt += " " + pick(
            rng,
            (
                f"You work for {words.proper(rng, 'train')}.",
                f"Today is {pick(rng, words.WEEKDAYS)}.",
                f"Your name is {words.first_name(rng, 'train')}.",
                "Be polite.",
                "Speak English.",
            ),
        )
    elif kind < 0.25:
        prompt += "\n" + stories.story(rng, "train")
    elif kind < 0.3:
        prompt = words.phrase(rng, "train")
    return [{"role": "system", "content": prompt}]


def conversation(rng: random.Random, split: Split, mix: Mix, exchanges: int) -> Document:
    """So many exchanges in a row; sometimes the first tells what the last asks for."""
    messages = _system(rng, 0.35)
    if rng.random() < 0.15:
        messages += smalltalk.opening(rng, split)
    middle: list[Message] = []
    for exchange in rng.choices(EXCHANGES, mix.weights, k=exchanges):
        middle += exchange(rng, split)
    if rng.random() < 0.3:
        told, asked = smalltalk.memory(rng, split)
        middle = told + (middle if rng.random() < 0.75 else []) + asked
    messages += middle
    if rng.random() < 0.08:
        messages += smalltalk.closing(rng, split)
    return Document("chat", messages=messages)


def tool_conversation(rng: random.Random, split: Split, mix: Mix) -> Document:
    """Tools on offer: mostly a request that one of them serves, sometimes one that none does."""
    messages = _system(rng, 0.4)
    if rng.random() < 0.08:
        case, turns = tools.pair_of_calls(rng, split)
        return Document("tools", messages=messages + turns, tools=tools.offer([case], rng, split))
    cases = [tools.known_case(rng, split) if rng.random() < mix.known else tools.unseen_case(rng, split)]
    while rng.random() < 0.3 and len(cases) < 4:
        case = tools.known_case(rng, split) if rng.random() < 0.5 else tools.unseen_case(rng, split)
        if case.family == "action" or case.family not in {other.family for other in cases}:
            cases.append(case)
    offered = tools.offer(cases, rng, split)
    if rng.random() < 0.12:  # nothing that the tools are for
        for _ in range(rng.randint(1, 2)):
            messages += pick(rng, BESIDE_TOOLS)(rng, split)
        return Document("tools", messages=messages, tools=offered)
    for case in cases:
        if rng.random() < 0.12:
            messages += pick(rng, BESIDE_TOOLS)(rng, split)
        messages += tools.turns(case)
        if case.family == "weather" and len(case.arguments) == 1 and rng.random() < 0.25:
            messages += tools.turns(tools.weather_again(case, rng, split))
    return Document("tools", messages=messages, tools=offered)


def document(rng: random.Random, split: Split, mix: Mix, *, long: bool = False) -> Document:
    """One text of the training mix. Long ones fill the 2,048 positions, so that these are trained too."""
    chance = rng.random()
    if long and chance < 0.6:
        return conversation(rng, split, mix, rng.randint(12, 45))
    if chance < mix.stories:
        return Document("story", text=stories.story(rng, split))
    if chance < mix.texts:
        return Document("text", text=facts.plain_text(rng))
    if chance < mix.chats:
        return conversation(rng, split, mix, pick(rng, (1, 1, 2, 2, 3, 4)))
    return tool_conversation(rng, split, mix)


def documents(seed: int, split: Split, *, long: bool = False, mix: str = "general") -> Iterator[Document]:
    """Endless, and the same for the same seed."""
    rng = random.Random(f"{split} {seed} {long}")
    while True:
        yield document(rng, split, MIXES[mix], long=long)


def as_row(document: Document) -> dict[str, Any]:
    """For people who want to look at the corpus: one JSON object."""
    return {"text": document.text} if document.text else {"messages": document.messages, "tools": document.tools}
