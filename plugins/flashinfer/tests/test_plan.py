"""Plans by bounds that are exact on the device; captured launches; and plans that do not overwrite each other."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

import flashinfer_cards
import torch

from engine.types.errors import ConfigError
from engine_flashinfer.staging import Staging
from engine_sdk.conformance.attention.case import Case, Form
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.subject import Subject

STEPS = {
    "decodes": ([[[30], [16], [60], [38]], [[0], [15], [16], [37]], [[1], [2], [90], [16]]], 4),
    "drafts": ([[range(28, 31), range(3)], [range(60, 63), range(88, 91)], [range(3), range(15, 18)]], 0),
    "prompts": ([[range(300), range(300)], [range(310, 610), range(300)], [range(20, 320), range(700, 1000)]], 0),
}


def body_of() -> Any:
    subject = Subject.of_card("attention", flashinfer_cards.DoubleFlashInfer, {})
    return subject.body()(worker_context(subject))


def refill(batch: Any, other: Any) -> None:
    for name, value in vars(other).items():
        if isinstance(value, torch.Tensor):
            getattr(batch, name).copy_(value)
    batch.query_start_loc_host = other.query_start_loc_host
    batch.seq_lens_bound = other.seq_lens_bound


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("steps", "exact", "divided"),
    [("decodes", False, True), ("drafts", True, True), ("drafts", False, False), ("prompts", True, False)],
)
def test_captured_launches_serve_later_steps(steps: str, exact: bool, divided: bool, window: int | None) -> None:
    """What a step launched is launched again with what the host knew first; buffers alone are new. Steps of many tokens
    are launched undivided, by the plan of the first one, and so are rows of several queries whose lengths are only
    bounded."""
    form = Form(kind="full" if window is None else "sliding", window=window, num_kv_heads=1)
    body, (rows, num_decodes) = body_of(), STEPS[steps]
    cases = [
        Case(form, each, num_decodes, 16, seed=i, width=70, bound=0 if exact else 5 * i + 1)
        for i, each in enumerate(rows)
    ]
    batch = cases[0].batch
    assert batch.bounds_are_exact == exact
    cases[0].write_history(body)
    plan = body.plan(batch, cases[0].group)
    captured = copy.copy(plan)
    captured.wrapper = copy.copy(plan.wrapper)  # what the host knew; the plan's memory and the buffers are shared
    pieces = dict(plan.wrapper._plan)
    for case in cases:
        cache = case.write_history(body)
        refill(batch, case.batch)
        assert body.plan(batch, case.group, plan) is plan
        out, lse = case.outputs()
        case.launch(body, cache, captured, out, lse)
        case.check(out, lse)
    assert plan.wrapper.is_cuda_graph_enabled == divided
    assert divided or plan.wrapper._plan == pieces, "plans of undivided rows do not follow lengths"


def test_bounds_that_say_too_much() -> None:
    """By how much does not matter: pieces past a row's end are empty. What says too little would leave keys out."""
    body = body_of()
    for bound in (0, 1, 15, 16, 200):
        case = Case(Form(), [[33], [16], [90], [0]], 4, 16, width=40, bound=bound)
        case.check(*case.run(body))
    case = Case(Form(), [[90], [33]], 2, 16, width=40)
    case.batch.seq_lens_bound = np.array([32, 33], np.int32)
    with pytest.raises(AssertionError, match="out"):
        case.check(*case.run(body))


def test_steps_of_all_sorts_are_divided_where_lengths_are_known() -> None:
    """Rows of several queries, of different numbers: pieces come together rightly for exact lengths alone."""
    body = body_of()
    for bound, divided in ((0, True), (17, False)):
        case = Case(Form(), [[60], range(88, 91), range(40)], 1, 16, width=40, bound=bound)
        case.check(*case.run(body))
        assert (body.plan(case.batch, case.group).wrapper._plan["chunk"] is not None) == divided
    case = Case(Form(), [range(60, 63), range(88, 91)], 0, 16, width=40)
    plan = body.plan(case.batch, case.group)
    case.batch.bounds_are_exact = False
    with pytest.raises(AssertionError, match="lengths the host knows"):
        body.plan(case.batch, case.group, plan)


def test_more_places_than_kernels_count() -> None:
    body = body_of()
    case = Case(Form(), [[3]], 1, 16)
    case.write_history(body)
    case.batch.block_table = torch.zeros(1, 1, dtype=torch.int32).expand(4096, 1 << 16)
    with pytest.raises(ConfigError, match="4096 rows of up to 1048576 tokens"):
        body.plan(case.batch, case.group)


class Event:
    passed = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_plans_under_way_are_left_alone() -> None:
    """A buffer is given out again when the device has read it, and not before."""
    events: list[Event] = []

    def event() -> Event:
        events.append(Event())
        return events[-1]

    staging = Staging(lambda: torch.empty(4, dtype=torch.uint8), event)
    first = staging.take()
    staging.sent(first)
    second = staging.take()
    staging.sent(second)
    assert second is not first and staging.take() is not first
    events[0].passed = True
    assert staging.take() is first
    events[1].passed = True
    assert staging.take() is second


def test_the_table_is_the_list_of_pages() -> None:
    """No page is copied: FlashInfer is given the block table's own memory, and lengths that make up for it."""
    body = body_of()
    case = Case(Form(num_kv_heads=2), [[40], [3]], 2, 16, width=6)
    case.write_history(body)
    plan = body.plan(case.batch, case.group)
    assert plan.indices.data_ptr() == case.batch.block_table.data_ptr()
    assert plan.row_start.tolist() == [0, 6, 12]
    assert plan.last_page_len.tolist() == [41 - 5 * 16, 4 - 5 * 16]
