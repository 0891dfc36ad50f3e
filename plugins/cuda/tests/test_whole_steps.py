"""Decode steps as one launch, on the processor: their kernel interpreted, a capture runs Python again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import harness
from harness import Driver, Request, params, prompt

from engine.interfaces.ops import Ops, StepInputs, StepTables
from engine.interfaces.platform import Trial
from engine.interfaces.step import WholeSteps
from engine.runner.worker import TorchWorker
from engine.sampling.sampler import SlotParameters
from engine.types.errors import ContractError
from engine.types.plan import NewSlot
from engine_cuda.platform_cuda.whole import CudaWholeSteps

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}


class WholePlatform(harness.BucketPlatform):
    """Captures decode steps whole, too."""

    captures_whole = True
    body = "test_whole_steps:WholePlatformBody"


class WholePlatformBody(harness.BucketPlatformBody):
    """`launched`: whole steps, so many."""

    launched = 0

    def whole_steps(self, ops: Ops, tables: StepTables, parameters: Any) -> WholeSteps:
        def record(fn: Callable[[], None], trial: Trial | None) -> Callable[[], None]:
            def replay() -> None:
                self.launched += 1
                fn()

            return replay

        return CudaWholeSteps(self, record, True, ops, tables, parameters)


class LaunchedAttention(harness.CapturableAttention):
    body = "test_whole_steps:LaunchedAttentionBody"


class LaunchedAttentionBody(harness.CapturableAttentionBody):
    plans_by_launches = True


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness knows both."""
    found, here = harness.registry, "test_whole_steps"
    more = (
        harness.Candidate("platform", "whole", 0, here, "1", f"{here}:WholePlatform"),
        harness.Candidate("attention", "launched", 0, here, "1", f"{here}:LaunchedAttention"),
    )
    monkeypatch.setattr(harness, "registry", lambda *others: found(*more, *others))


def whole() -> TorchWorker:
    return harness.started(platform="whole", attention="launched")


def launched(worker: TorchWorker) -> int:
    """How many steps were launched whole; 0 where none can be."""
    runner = worker._runner
    assert runner is not None
    return getattr(runner._platform, "launched", 0)


def outputs(worker: TorchWorker, seed: int) -> list[list[int]]:
    """Requests come and go beside others, two steps in flight; greedy ones and sampled ones, in slots used again."""
    driver, random = Driver(worker, seed), np.random.default_rng(seed)
    running: list[Request] = []
    ended: list[Request] = []
    for number in range(10):
        free = [slot for slot in range(8) if all(request.slot != slot for request in running)]
        new = [
            Request(prompt(int(random.integers(1, 20)), seed + number), params(**SAMPLED if number % 3 else {}), slot)
            for slot in free[: int(random.integers(0, 4))]
        ]
        work = [(request, 1) for request in running] + [(request, len(request.prompt)) for request in new]
        running += new
        if work:
            driver.step(*sorted(work, key=lambda one: one[1] > 1))
        for _ in range(int(random.integers(0, 4)) if running else 0):
            driver.submit(*((request, 1) for request in running))
            driver.submit(*((request, 1) for request in running[: int(random.integers(1, 9))]))
            driver.take()
            driver.take()
        ended += running[::3]
        running = [request for request in running if request not in ended]
    return [request.outputs for request in ended + running]


@pytest.mark.parametrize("seed", range(3))
def test_they_give_the_tokens_of_others(seed: int) -> None:
    plain, worker = harness.started(), whole()
    assert outputs(plain, seed) == outputs(worker, seed)
    assert launched(worker) > 5
    runner = worker._runner
    assert runner is not None
    tables = runner._slots.tables
    assert not tables.tokens[runner._slots.scratch_slot, 0], "rows that pad read another token than 0"


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"min_tokens": 3},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": [1, 2, 3]},
    ],
    ids=str,
)
def test_rows_that_ask_for_more_are_computed_as_before(asked: dict[str, Any]) -> None:
    """And from when they have left, all others as one again."""
    found = []
    for worker in (harness.started(), whole()):
        counts, driver = [], Driver(worker)
        plain, more = Request(prompt(5), params(), slot=0), Request(prompt(7, 1), params(**asked), slot=1, stop_ids=[4])
        driver.step((plain, 5), (more, 7))
        for _ in range(4):
            driver.step((plain, 1), (more, 1))
            counts.append(launched(worker))
        driver.step((plain, 1))
        counts.append(launched(worker))
        found.append((plain.outputs, more.outputs, more.logprobs))
    assert found[0] == found[1]
    assert counts == [0, 0, 0, 0, 1]


def test_a_last_token_of_a_prompt_that_is_one_chunk_draws_and_one_before_it_does_not() -> None:
    """A row of one token that draws nothing must not write behind it."""
    found = []
    for worker in (harness.started(), whole()):
        driver, request = Driver(worker), Request(prompt(6), params(), slot=0)
        for _ in range(6):
            driver.step((request, 1))
        driver.step((request, 1))
        found.append(request.outputs)
    assert found[0] == found[1] and len(found[0]) == 2


def test_rows_take_what_their_slots_hold() -> None:
    """And are sent again only when a request has entered."""
    slots, sent = 5, []

    class Platform:
        device = torch.device("cpu")

        def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
            sent.append(out.numel())
            out.copy_(host)

    parameters = SlotParameters(slots, 100)
    tables = StepTables(
        torch.zeros(slots + 1, 9, dtype=torch.int32), (torch.zeros(slots + 1, 2, dtype=torch.int32),), (4,)
    )
    made = CudaWholeSteps(Platform(), None, True, None, tables, parameters)  # type: ignore[arg-type]
    asked = [
        params(temperature=0.1 * slot, top_p=0.5 + 0.1 * slot, min_p=0.01 * slot, top_k=slot, seed=2**63 + slot)
        for slot in range(slots)
    ]
    for slot, one in enumerate(asked):
        parameters.enter(
            NewSlot(
                slot=slot, request_id="", token_ids=np.zeros(slot + 1, np.int32), num_prompt_tokens=slot + 1,
                params=one, stop_token_ids=np.zeros(0, np.int32),
            )
        )  # fmt: skip
    made.send()
    made.send()
    assert len(sent) == 1
    slot_of_row, lengths = torch.tensor([3, 0, 4, 1, 5, 5, 2]).int(), torch.tensor([7, 2, 8, 5, 1, 1, 3]).int()
    none = torch.zeros(0, dtype=torch.int32)
    inputs = StepInputs(slot_of_row, none, none, lengths, none, none, (), ())
    rows, slot, place = made.rows(inputs)
    assert slot.tolist() == slot_of_row.tolist() and place.tolist() == lengths.tolist()
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        of_slots = np.append(getattr(parameters, name), 0)
        assert getattr(rows, name).numpy().tolist() == of_slots[slot_of_row].tolist(), name
    assert rows.position.tolist() == [7 - 4, 2 - 1, 8 - 5, 5 - 2, 1, 1, 3 - 3]
    parameters.version += 1
    made.send()
    assert len(sent) == 2


def test_what_cannot_be_captured_is_left_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(fn: Callable[[], None], trial: Trial | None) -> Callable[[], None]:
        raise ContractError("capture a decode step", "it copies from the host", "leave that", point="platform")

    tables = StepTables(torch.zeros(3, 9, dtype=torch.int32), (), ())
    platform = type("Platform", (), {"device": torch.device("cpu")})()
    trial = Trial(lambda number: None, lambda: ())
    for insists in (True, False):
        made = CudaWholeSteps(platform, refuse, insists, None, tables, SlotParameters(2, 9))  # type: ignore[arg-type]
        if insists:
            with pytest.raises(ContractError):
                made.capture(None, lambda: None, trial)  # type: ignore[arg-type]
        else:
            assert made.capture(None, lambda: None, trial) is None  # type: ignore[arg-type]
    assert "it copies from the host" in caplog.text
