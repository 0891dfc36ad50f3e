"""Captured steps with drafts: which plans they compute, and that what pads their rows touches nothing. What a drafter
may not answer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import remote
import torch
from harness import Driver, Request, choice, params, prompt, registry, start_message, started

from engine.interfaces.drafter import Drafts
from engine.interfaces.platform import CaptureKey
from engine.plugin import Candidate
from engine.runner.capture import padding_of, width_of, widths_of
from engine.runner.worker import TorchWorker
from engine.types.plan import GivenDrafts, NewBlocks, NewSlot, StepPlan, StepResult


def drafting_worker() -> TorchWorker:
    """With the platform that pads, and a drafter of at most three tokens, which nobody asks."""
    plain = start_message(platform="buckets", attention="capturable")
    drafter = choice(registry(), "drafter", "ngram", options={"num_tokens": 3})
    return started(platform="buckets", attention="capturable", choices=(*plain.choices, drafter))


def entries(*rows: tuple[int, int, int]) -> NewBlocks:
    slot, index, page = np.array(rows, np.int32).reshape(-1, 3).T
    return NewBlocks(slot=slot, index=index, page=page)


def step(worker: TorchWorker, number: int, computed: list[int], tokens: list[int], **fields: Any) -> StepResult:
    of_plan: dict[str, Any] = {
        "step_id": number,
        "slot_of_row": np.arange(len(tokens), dtype=np.int32),
        "num_computed": np.array(computed, np.int32),
        "num_tokens": np.array(tokens, np.int32),
        "samples": np.ones(len(tokens), bool),
        "num_decodes": 0,
        "new_slots": [],
        "new_blocks": [entries(), entries()],
    }
    return worker.execute(StepPlan(**(of_plan | fields))).result(timeout=60)


def test_padding_writes_to_nobodys_pages() -> None:
    """Row 0's next pages were given back and are row 1's by now, but its table on the device still names them."""
    prompts = [prompt(7), prompt(15, 1)]
    expected = [Driver(started()).alone(Request(tokens, params(), slot=i), 6) for i, tokens in enumerate(prompts)]
    worker = drafting_worker()
    slots = [
        NewSlot(
            slot=i, request_id=str(i), token_ids=np.array(tokens, np.int32), num_prompt_tokens=len(tokens),
            params=params(), stop_token_ids=np.array([], np.int32),
        )
        for i, tokens in enumerate(prompts)
    ]  # fmt: skip
    # Blocks of 8 tokens; pages 20 and 21 stand in both rows' tables.
    sliding = entries((0, 0, 1), (0, 1, 20), (1, 0, 3), (1, 1, 20), (1, 2, 6))
    full = entries((0, 0, 11), (0, 1, 21), (1, 0, 21), (1, 1, 12), (1, 2, 13))
    first = step(worker, 0, [0, 0], [7, 15], new_slots=slots, new_blocks=[sliding, full]).tokens.tolist()
    assert first == [expected[0][0], expected[1][0]]
    drafts = [expected[1][1], expected[1][2], (expected[1][3] + 1) % 61]
    given = GivenDrafts(row=np.array([1], np.int32), tokens=np.array([drafts], np.int32))
    number = np.array([0, 3], np.int32)
    told = step(worker, 1, [7, 15], [1, 4], num_drafts=number, given_drafts=given).tokens.tolist()
    captures = worker._runner._platform.captures  # type: ignore[union-attr]
    assert captures[CaptureKey(2, 4)] == 1, "the step was captured"
    assert told == [[expected[0][1], -1, -1, -1], [*expected[1][1:4], -1]]
    later = step(worker, 2, [18], [1], slot_of_row=np.array([1], np.int32), num_decodes=1).tokens
    assert later.tolist() == expected[1][4:5]
    worker.shutdown()


def test_rows_that_draw_more_tokens_than_a_captured_step_has_rows() -> None:
    """Drafts that come with a plan, on a worker that has no drafter, and has captured steps with prompts."""
    tokens = prompt(7)
    expected = Driver(started()).alone(Request(tokens, params(), slot=0), 9)
    worker = started(platform="buckets", attention="capturable")
    new = NewSlot(
        slot=0, request_id="0", token_ids=np.array(tokens, np.int32), num_prompt_tokens=7, params=params(),
        stop_token_ids=np.array([], np.int32),
    )  # fmt: skip
    blocks = [entries((0, 0, 1), (0, 1, 2)), entries((0, 0, 3), (0, 1, 4))]
    assert step(worker, 0, [0], [7], new_slots=[new], new_blocks=blocks).tokens.tolist() == expected[:1]
    given = GivenDrafts(row=np.array([0], np.int32), tokens=np.array([expected[1:8]], np.int32))
    told = step(worker, 1, [7], [8], num_drafts=np.array([7], np.int32), given_drafts=given).tokens.tolist()
    assert told == [expected[1:9]]
    worker.shutdown()


def plan(num_computed: list[int], num_drafts: list[int], samples: bool = True, more: int = 0) -> StepPlan:
    drafts = np.array(num_drafts, np.int32)
    return StepPlan(
        step_id=0, slot_of_row=np.arange(len(drafts), dtype=np.int32), num_computed=np.array(num_computed, np.int32),
        num_tokens=1 + drafts + more, samples=np.full(len(drafts), samples), num_decodes=0, new_slots=[], new_blocks=[],
        num_drafts=drafts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "captures", "width"),
    [
        (plan([9, 9], [3, 3]), "padded", 4),
        (plan([9, 9], [3, 3]), "alike", 4),
        (plan([9, 9], [3, 1]), "padded", 4),
        (plan([9, 9], [3, 1]), "alike", 0),
        (plan([9, 9], [2, 2]), "alike", 3),
        (plan([9, 9], [4, 4]), "padded", 0),  # more drafts than were captured
        (plan([9, 30], [3, 0]), "padded", 0),  # padding past the longest sequence
        (plan([9, 28], [3, 0]), "padded", 4),
        (plan([9] * 300, [3] * 2 + [0] * 298), "padded", 0),  # more padding than tokens
        (plan([9] * 300, [3] * 200 + [0] * 100), "padded", 4),
        (plan([9, 9], [1, 1], samples=False), "padded", 0),
        (plan([9, 9], [1, 1], more=1), "padded", 0),  # a prompt's tokens among them
    ],
)
def test_which_plans_are_computed_by_a_captured_step(found: StepPlan, captures: str, width: int) -> None:
    assert found.num_drafts is not None
    widths = widths_of(captures, 3, 32)  # type: ignore[arg-type]
    assert width_of(found, found.num_drafts, captures, widths, 32) == width  # type: ignore[arg-type]


def test_padding() -> None:
    assert padding_of(plan([0, 0, 0], [1, 3, 0]), 4).tolist() == [2, 3, 9, 10, 11]  # type: ignore[union-attr]
    assert padding_of(plan([0, 0], [3, 3]), 4) is None and padding_of(plan([0], [0]), 1) is None
    assert widths_of("padded", 3, 32) == (1, 4) and widths_of("alike", 3, 4) == (1, 2, 3)
    assert widths_of("never", 3, 32) == widths_of("alike", 0, 32) == (1,)


@pytest.mark.parametrize(
    ("branches", "parents", "probs", "found"),
    [
        (True, [-1, 1, 0], False, r"parents array\(\[-1,  1,  0\]\)$"),
        (True, [-1, 0], False, r"parents array\(\[-1,  0\]\)$"),
        (True, [-1, -2, 0], False, "parents"),
        (True, [-1, -1, 0], True, "parents .* and probabilities"),
        (False, [-1, 0, 1], False, "parents"),
    ],
)
def test_trees_of_a_wrong_form_are_refused(
    branches: bool, parents: list[int], probs: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that follows itself, fewer parents than drafts, one that follows nothing; with probabilities; of a
    drafter whose card announces none."""
    drafts = Drafts(torch.zeros(1, 3, dtype=torch.int32), parents=np.array(parents))
    drafts = drafts._replace(probs=torch.ones(1, 3, 61) / 61 if probs else None)
    monkeypatch.setattr(remote.BranchingBody, "propose", lambda *_: drafts)
    monkeypatch.setattr(remote.Branching, "branches", lambda options: branches)
    candidates = registry(Candidate("drafter", "branching", 1, "harness", "1", "remote:Branching"))
    drafter = choice(candidates, "drafter", "branching", options={"num_tokens": 3})
    worker = TorchWorker(start_message(choices=(*start_message().choices, drafter)), candidates)
    worker.start()
    new = NewSlot(
        slot=0, request_id="0", token_ids=np.array([5], np.int32), num_prompt_tokens=1, params=params(),
        stop_token_ids=np.array([], np.int32),
    )  # fmt: skip
    blocks = [entries((0, 0, 1)), entries((0, 0, 2))]
    told = step(worker, 0, [0], [4], new_slots=[new], new_blocks=blocks, num_drafts=np.array([3], np.int32))
    assert told.errors is not None
    asked = "chains, or trees without probabilities" if branches else "chains"
    _, wanted, was, _ = told.errors[0]
    assert wanted == f"drafts for 1 rows, at most 3 each: {asked}" and re.search(found, was)
    worker.shutdown()
