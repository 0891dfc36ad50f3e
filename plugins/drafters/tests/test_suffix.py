"""Drafter `suffix`: its automaton against what a text says by itself, its memory, and an engine that drafts by it."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import drafters
import numpy as np
import pytest
import torch
from harness import VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import Schedule, examples, schedules
from test_real_schedules import run_with_drafts

from engine import LLM, SamplingParams
from engine.types.plan import NewSlot
from engine_drafters.suffix.automaton import SEPARATOR, SuffixAutomaton
from engine_drafters.suffix.card import SuffixOptions
from engine_drafters.suffix.drafter import SuffixDrafterBody
from engine_drafters.suffix.history import FinishedAnswers, RequestText

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import DrafterConformance


class TestSuffix(DrafterConformance):
    driver = "suffix"


class TestForgets(DrafterConformance):
    """Small memories, which are full all the time."""

    driver = "suffix"
    options: ClassVar[dict[str, Any]] = {"max_tokens": 30, "max_own_tokens": 12, "max_depth": 3}


def longest_end(text: list[int], reader: list[int], depth: int) -> int:
    """The length of the longest end of the reader's text, up to the depth, that stands in the text."""
    return max(
        length
        for length in range(min(depth, len(reader), len(text)) + 1)
        if any(text[i : i + length] == reader[len(reader) - length :] for i in range(len(text) - length + 1))
    )


def followers(text: list[int], piece: list[int]) -> Counter[int]:
    """What follows a piece of the text how often."""
    n = len(piece)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == piece)


def chances(text: list[int], reader: list[int], tokens: list[int], depth: int) -> list[float]:
    """The probability of each token after the reader's text and the tokens before it, by the definition: how often it
    followed the longest end that was followed by anything. Of these it must be among the most frequent."""
    found = []
    for i, token in enumerate(tokens):
        before = reader + tokens[:i]
        for length in range(min(depth, len(before)), 0, -1):
            if counts := followers(text, before[len(before) - length :]):
                break
        assert counts[token] == max(counts.values())
        found.append(counts[token] / counts.total())
    return found


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=60),
    depth=st.integers(1, 5),
    most=st.integers(0, 6),
    least=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=examples(100), deadline=None)
def test_the_automaton_equals_the_definition(
    steps: list[tuple[bool, int]], depth: int, most: int, least: float
) -> None:
    """A text that grows while somebody follows another one in it."""
    automaton, text, reader, place = SuffixAutomaton(depth), list[int](), list[int](), (0, 0)
    for grows, token in steps:
        if grows:
            automaton.add(token)
            text.append(token)
        else:
            expected = min(longest_end(text, reader, depth), place[1]) if reader else 0
            reader.append(token)
            place = automaton.follow(*place, token)
            assert place[1] <= longest_end(text, reader, depth)
            if expected == longest_end(text, reader[:-1], depth):  # nothing longer has come since
                assert place[1] == longest_end(text, reader, depth)
    matched = reader[len(reader) - place[1] :]
    tokens, score = automaton.continuation(*place, most, least)
    assert len(tokens) <= most
    found = chances(text, matched, tokens, depth)
    running, total = 1.0, 0.0
    for chance in found:
        running *= chance
        total += running
    assert score == pytest.approx(total) and (not tokens or running >= least)
    if matched and len(tokens) < most and least == 0.0:
        after = matched + tokens
        assert not any(followers(text, after[len(after) - n :]) for n in range(1, min(depth, len(after)) + 1))


def test_it_grows_in_linear_time_and_space() -> None:
    """Whatever the text: one token again and again is the worst for the links, which are then as long as the text."""
    for text in ([3] * 3000, [i % 7 for i in range(3000)], [(i * i) % 97 for i in range(3000)]):
        automaton = SuffixAutomaton(8)
        for token in text:
            automaton.add(token)
        assert len(automaton._link) < 2 * len(text)
        assert sum(map(len, automaton._next)) < 3 * len(text)


def test_answers_are_forgotten_the_oldest_first() -> None:
    answers = FinishedAnswers(max_tokens=40, depth=4)
    for number, salt in product(range(8), ("a", None)):
        answers.add(salt, array("i", [number] * 4))
        answers.settle(100)
        sizes = [volume.size for salt in ("a", None) for volume in answers.volumes(salt)]
        assert sum(sizes) <= 40
    assert all(volume.follow(0, 0, 7)[1] for volume in answers.volumes("a")[-1:])
    assert not any(volume.follow(0, 0, 1)[1] for volume in answers.volumes("a"))
    assert not answers.volumes("b")


def test_answers_wait_in_bounded_memory_and_are_read_in_turn() -> None:
    answers = FinishedAnswers(max_tokens=100, depth=4)
    for number in range(1000):
        answers.add(None, array("i", [number] * 10))
    answers.settle(25)
    (volume,) = answers.volumes(None)
    assert volume.size == 25 + 2 and volume.follow(0, 0, 990)[1] and not volume.follow(0, 0, 989)[1]
    nothing = FinishedAnswers(max_tokens=0, depth=4)
    nothing.add(None, array("i", [1, 2]))
    assert not nothing._waiting, "nobody may ever ask for drafts"
    nothing.settle(100)
    assert not nothing.volumes(None)


def test_a_long_answer_is_read_in_over_several_steps() -> None:
    """None is lost of what more answers, which come meanwhile, push out of the queue."""
    answers = FinishedAnswers(max_tokens=400, depth=4)
    answers.add(None, array("i", range(50)))
    answers.settle(20)
    (volume,) = answers.volumes(None)
    assert volume.size == 20
    for number in range(50):
        answers.add("a", array("i", [number] * 10))
    answers.settle(20)
    answers.settle(20)
    assert volume.size == 51 and [volume.size for volume in answers.volumes("a")] == [11]
    place = 0, 0
    for token in range(50):
        place = volume.follow(*place, token)
    assert place[1] == 4 and volume.continuation(*place, 1, 0.0) == ([], 0.0), "its end is an end"


def test_a_resumed_request_is_remembered_once() -> None:
    context: Any = SimpleNamespace(options=SuffixOptions(), platform=None)
    drafter = SuffixDrafterBody(context)
    session: Any = SimpleNamespace(tokens=torch.arange(40, dtype=torch.int32).view(1, 40))
    for known, ends in ((10, 20), (20, 20), (20, 30)):
        tokens = np.arange(known, dtype=np.int32)
        stop = np.empty(0, np.int32)
        new = NewSlot(
            slot=0, request_id="r", token_ids=tokens, num_prompt_tokens=10, params=SamplingParams(), stop_token_ids=stop
        )
        drafter.enter(new)
        drafter.leave(0, ends, session)
    drafter._answers.settle(100)
    (volume,) = drafter._answers.volumes(None)
    assert volume.size == 2 * (8 + 10 + 1), "each half with what came before it"
    assert not drafter._requests


def test_no_match_is_longer_than_what_is_compared() -> None:
    with pytest.raises(ValueError, match="min_match 6 is above max_depth 5"):
        SuffixOptions(min_match=6, max_depth=5)


def drafts_of(text: RequestText, most: int = 4, max_factor: float = 9.0) -> list[int]:
    return text.drafts(most, ahead=8, min_match=1, max_factor=max_factor, least=0.1)


def test_a_text_that_repeats_itself_is_continued() -> None:
    text = RequestText(array("i", [5, 6, 7, 5, 6, 7, 5, 6]), 8, None, max_tokens=100, depth=8)
    assert text.read(100, []) == (92, True)
    assert drafts_of(text, 7) == [7, 5, 6, 7, 5, 6, 7]
    assert drafts_of(text, 7, max_factor=0.5) == [7, 5], "a match of five"


def test_the_place_that_promises_most_is_chosen() -> None:
    """A long match that went on in two ways, and a short one that never did: the sum of chances decides."""
    other = SuffixAutomaton(8)
    for token in (1, 2, 3, 9, 9, SEPARATOR, 1, 2, 3, 8, 8, SEPARATOR):
        other.add(token)
    text = RequestText(array("i", [3, 4, 4, 4, 4, 1, 2, 3]), 8, None, max_tokens=100, depth=8)
    assert text.read(100, [other])[1]
    assert drafts_of(text) == [4, 4, 4, 4]
    alone = RequestText(array("i", [1, 2, 3]), 3, None, max_tokens=100, depth=8)
    assert alone.read(100, [other])[1]
    assert drafts_of(alone) == [8, 8], "of what is equally frequent the last; a text's end is no draft"


def test_a_long_prompt_is_read_over_several_steps() -> None:
    text = RequestText(array("i", [1, 2] * 50), 100, None, max_tokens=60, depth=8)
    assert text.read(40, []) == (0, False)
    assert text.read(40, []) == (20, True), "of 100 tokens the newest 60 count"
    assert drafts_of(text) == [1, 2, 1, 2]


PROMPTS = ["one two three one two three one two", "Grüße 你好", "la la la la la la la", "one two three"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=30, logprobs=3, frequency_penalty=0.3, n=2),
    SamplingParams(temperature=0.4, top_k=3, seed=6, max_tokens=40, min_tokens=20, repetition_penalty=0.8),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
]
SIZES = {"max_num_seqs": 3, "num_kv_pages": 60, "max_model_len": 128, "dtype": "float64"}


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_outputs_are_those_without_a_drafter(adaptive: bool) -> None:
    """Few pages, so that requests are preempted; the second time all answers are known."""
    options = {"drafter.num_tokens": 6, "drafter.adaptive": adaptive, "drafter.cost": 0.05}
    with LLM("tiny", **SIZES) as plain, LLM("tiny", drafter="suffix", **options, **SIZES) as drafting:
        expected = plain.generate(PROMPTS, PARAMS, use_tqdm=False)
        accepted = []
        for _ in range(2):
            before = drafting.llm_engine.stats()
            found = drafting.generate(PROMPTS, PARAMS, use_tqdm=False)
            after = drafting.llm_engine.stats()
            accepted.append(after.num_accepted_drafts - before.num_accepted_drafts)
            for one, other in zip(found, expected, strict=True):
                assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert accepted[1] > 2 * accepted[0] > 0 and accepted[1] > 120, "what was answered before is known"


@given(schedule=schedules(VOCAB, max_requests=6, drafters=("suffix",)), seed=st.integers(0, 2**32))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_changes_no_token_of_any_schedule(schedule: Schedule, seed: int) -> None:
    """In float64, with whatever the schedules of the core's own tests bring: preemption, swapping, steps in flight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "options", lambda kind: (kind, {"max_tokens": 200, "max_own_tokens": 30}))
        run_with_drafts(schedule, seed)
