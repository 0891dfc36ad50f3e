"""The corpus is the same for the same seed, its splits do not meet, and what it teaches is true."""

import itertools
import json
import random

import pytest

from engine_tiny.corpus import arithmetic, chat, extraction, facts, stories, tools, words
from engine_tiny.corpus.base import is_held_out


def take(seed: int, split: str, count: int = 200, *, long: bool = False) -> list[dict]:
    return [chat.as_row(document) for document in itertools.islice(chat.documents(seed, split, long=long), count)]


def test_same_seed_same_text():
    assert take(3, "train") == take(3, "train")
    assert take(3, "train") != take(4, "train")
    assert take(3, "train", 20, long=True) == take(3, "train", 20, long=True)


def test_nonsense_words_of_the_splits_do_not_meet():
    rng = random.Random(1)
    seen = {words.nonsense(rng, "train") for _ in range(4000)}
    held_out = {words.nonsense(rng, "held_out") for _ in range(400)}
    assert not seen & held_out
    assert len(seen) > 3000


def test_fact_questions_of_the_splits_do_not_meet():
    rng = random.Random(2)
    seen = {facts.exchange(rng, "train")[0]["content"] for _ in range(4000)}
    held_out = {facts.exchange(rng, "held_out")[0]["content"] for _ in range(400)}
    assert not seen & held_out


def test_facts_of_the_evaluation_are_asked_nowhere_in_training():
    seen = {
        message["content"].lower()
        for document in itertools.islice(chat.documents(8, "train"), 3000)
        for message in document.messages
        if message["role"] == "user"
    }
    rng = random.Random(9)
    assert not seen & {facts.never_asked(rng)[0]["content"].lower() for _ in range(300)}


def test_sums_of_the_splits_do_not_meet():
    rng = random.Random(3)
    for split in ("train", "held_out"):
        for _ in range(500):
            a, operator, b, value = arithmetic.problem(rng, split)
            assert value == {"+": a + b, "-": a - b, "*": a * b}[operator]
            assert operator == "*" or is_held_out(f"sum {a} {operator} {b}") == (split == "held_out")


def test_extraction_answers_stand_in_the_sentence():
    rng = random.Random(4)
    for _ in range(500):
        question, answer = extraction.exchange(rng, "train")
        values = json.loads(answer["content"])
        assert values
        for key, value in values.items():
            assert key in question["content"]
            assert str(value) in question["content"]


@pytest.mark.parametrize("make", [tools.known_case, tools.unseen_case])
def test_calls_fit_the_offered_tool(make):
    rng = random.Random(5)
    for _ in range(500):
        case = make(rng, "train")
        offered = {tool["function"]["name"]: tool["function"] for tool in tools.offer([case], rng, "train")}
        properties = offered[case.name]["parameters"]["properties"]
        assert set(case.arguments) <= set(properties)
        for key, value in case.arguments.items():
            assert isinstance(value, {"string": str, "integer": int, "number": int}[properties[key]["type"]])


def test_tool_conversations_offer_what_they_call():
    for document in itertools.islice(chat.documents(6, "train"), 500):
        called = {c["function"]["name"] for m in document.messages for c in m.get("tool_calls", ())}
        assert called <= {tool["function"]["name"] for tool in document.tools or ()}


def test_stories_leave_no_slot_open():
    rng = random.Random(7)
    for _ in range(300):
        assert not set("{}") & set(stories.story(rng, "train"))
