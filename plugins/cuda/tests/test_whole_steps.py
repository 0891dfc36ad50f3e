"""Decode steps as one launch, on the processor: their kernel interpreted, a capture runs Python again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import compiled
import harness
from harness import Driver, Request, params, prompt

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.context import WorkerContext
from engine.interfaces.ops import Ops, StepInputs, StepTables
from engine.interfaces.platform import Trial
from engine.interfaces.step import without_whole_steps
from engine.runner.assemble import Assembly
from engine.runner.buffers import SlotTables
from engine.runner.worker import TorchWorker
from engine.sampling.sampler import SlotParameters
from engine.types.errors import ContractError
from engine.types.kv import KVGroup
from engine.types.plan import NewBlocks, NewSlot, StepPlan
from engine_cuda.platform_cuda.trial import compare
from engine_cuda.platform_cuda.whole import ROWS, TURNS, CudaWholeSteps, begin_kernel, tell_kernel
from engine_sdk.conformance.whole_steps import STEPS, check_whole_steps

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}


class Done:
    """The event behind work that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class WholePlatform(harness.BucketPlatform):
    """Captures decode steps whole, too."""

    requires_minor = 7
    body = "test_whole_steps:WholePlatformBody"


class WholePlatformBody(harness.BucketPlatformBody):
    """`launched`: whole steps, so many. Each is tried as `engine_cuda.platform_cuda.graphs.Graphs` tries it."""

    launched = 0
    why_not: Sequence[str] = ()

    def whole_steps(
        self, ops: Ops, tables: StepTables, parameters: Any, why_not: Sequence[str]
    ) -> CudaWholeSteps | None:
        self.why_not = why_not
        if why_not:
            return None
        return CudaWholeSteps(self, self._record, Done, True, ops, tables, parameters)  # type: ignore[arg-type]

    def _record(self, fn: Callable[[], None], trial: Trial) -> Callable[[], None]:
        found = []
        for number in (0, 1):
            trial.prepare(number)
            fn()
            found.append(tuple(tensor.clone() for tensor in trial.outputs()))
        for number, expected in enumerate(found):
            trial.prepare(number)
            fn()
            compare(trial.outputs(), expected, number)

        def replay() -> None:
            self.launched += 1
            fn()

        return replay


class LaunchedAttention(harness.CapturableAttention):
    body = "test_whole_steps:LaunchedAttentionBody"


class LaunchedAttentionBody(harness.CapturableAttentionBody):
    plans_by_launches = True

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """Of steps of one token a row by what lies on the device alone, as launches would: in a trial it is all."""
        if batch.num_rows == batch.num_tokens and not batch.any_rows:
            batch = replace(
                batch,
                num_decodes=batch.num_rows,
                query_start_loc_host=batch.query_start_loc.numpy(),
                seq_lens_bound=batch.seq_lens.numpy(),
            )
        return super().plan(batch, group, out)


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


def test_a_request_that_comes_back_draws_on_in_another_slot() -> None:
    """Its place in the output is that of its request, and its parameters are its own, not its slot's before."""
    found = []
    for worker in (harness.started(), whole()):
        driver = Driver(worker)
        drawn, greedy = Request(prompt(9), params(**SAMPLED), slot=0), Request(prompt(4, 1), params(), slot=1)
        driver.step((drawn, 9), (greedy, 4))
        for _ in range(3):
            driver.step((drawn, 1), (greedy, 1))
        driver.preempt(drawn, slot=1)  # where the other, which ends, has been
        other = Request(prompt(5, 2), params(**SAMPLED | {"seed": 5}), slot=0)
        driver.step((drawn, len(drawn.tokens)), (other, 5))
        for _ in range(4):
            driver.step((drawn, 1), (other, 1))
        found.append((drawn.outputs, other.outputs, greedy.outputs))
    assert found[0] == found[1]
    assert launched(worker) == 7


def test_a_step_whose_drafter_found_nothing_says_how_many_it_found() -> None:
    """The scheduler takes no result without that for a plan with drafts."""
    message = harness.start_message(platform="whole", attention="launched")
    drafter = harness.choice(harness.registry(), "drafter", "ngram", options={"num_tokens": 3, "min_match": 4})
    worker = harness.started(choices=(*message.choices, drafter))
    Driver(worker).step((Request([1, 2, 3, 4], params(), slot=0), 4))
    none = np.zeros(0, np.int32)
    plan = StepPlan(
        step_id=1,
        slot_of_row=np.zeros(1, np.int32),
        num_computed=np.full(1, 4, np.int32),
        num_tokens=np.full(1, 4, np.int32),
        samples=np.ones(1, bool),
        num_decodes=0,
        new_slots=[],
        new_blocks=[NewBlocks(slot=none, index=none, page=none)] * 2,
        num_drafts=np.full(1, 3, np.int32),
    )
    result = worker.execute(plan).result()
    assert result.num_drafts is not None and result.num_drafts.tolist() == [0]
    assert result.tokens.shape == (1, 1) and launched(worker) == 0


def test_a_trial_leaves_what_its_input_alone_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where so few rows are tried that they see places of the null page that the other input writes."""
    few = "test_whole_steps.WholePlatformBody.buckets"  # of the module that the worker imports
    monkeypatch.setattr(few, lambda body, rows, each=1: (2, 5) if each == 1 else ())
    worker = whole()
    assert worker._runner is not None and worker._runner._buckets == {1: (2, 5)}
    driver, request = Driver(worker), Request(prompt(5), params(), slot=0)
    driver.step((request, 5))
    driver.step((request, 1))
    assert launched(worker) == 1


def test_the_platform_is_told_why_no_step_is_whole() -> None:
    worker = harness.started(platform="whole", attention="capturable")
    assert worker._runner is not None
    assert worker._runner._platform.why_not == ["attention is planned by the host"]  # type: ignore[attr-defined]
    driver, request = Driver(worker), Request(prompt(5), params(), slot=0)
    driver.step((request, 5))
    driver.step((request, 1))
    assert launched(worker) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": {"tp": 0}}, None),
        ({"groups": {"tp": 0, "dp": 0}}, "other ranks share its inputs or draws"),
        ({"not_captured": None}, "no step is captured"),
        ({"not_captured": ("ops 'far' is not recorded",)}, "no step is captured"),
        ({"drafter": SimpleNamespace(observes=False)}, None),
        ({"drafter": SimpleNamespace(observes=True)}, "the drafter looks at each step"),
    ],
    ids=str,
)
def test_what_speaks_against_whole_steps(change: dict[str, Any], reason: str | None) -> None:
    attention = SimpleNamespace(groups=[0], backend=lambda group: LaunchedAttentionBody)
    built = SimpleNamespace(**{"attention": attention, "groups": {}, "drafter": None, "not_captured": ()} | change)
    assert Assembly.not_whole(built) == ([] if reason is None else [reason])  # type: ignore[arg-type]


def test_rows_take_what_their_slots_hold() -> None:
    """And are sent again only when a request has entered. New pages are in the tables then, more than a program's."""
    slots, sent, width = 5, [], 2 * ROWS

    class Platform:
        device = torch.device("cpu")

        def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
            sent.append(out.numel())
            out.copy_(host)

    parameters = SlotParameters(slots, 100)
    blocks = tuple(torch.zeros(slots + 1, width, dtype=torch.int32) for _ in range(2))
    tables = StepTables(torch.zeros(slots + 1, 9, dtype=torch.int32), blocks, (4, 4))
    made = CudaWholeSteps(Platform(), None, Done, True, None, tables, parameters)  # type: ignore[arg-type]
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
    index = np.arange(ROWS + 3, dtype=np.int32)
    fresh = [NewBlocks(slot=index % slots, index=index, page=index + 7), NewBlocks(slot=index[:1], index=index[4:5],
             page=index[9:10])]  # fmt: skip
    behind = np.array([1, 0, 0, 9], np.int32)  # what an earlier step has left is not read
    rows, slot, place = made.begin(inputs, torch.from_numpy(np.append(SlotTables.news(fresh), behind)))
    expected = [torch.zeros_like(table) for table in blocks]
    for table, new in zip(expected, fresh, strict=True):
        table[new.slot, new.index] = torch.from_numpy(new.page)
    assert all(map(torch.equal, blocks, expected)) and blocks[1].sum() == 9
    made.begin(inputs, torch.from_numpy(np.append(SlotTables.news([]), behind)))
    assert all(map(torch.equal, blocks, expected))
    assert slot.tolist() == slot_of_row.tolist() and place.tolist() == lengths.tolist()
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        of_slots = np.append(getattr(parameters, name), 0)
        assert getattr(rows, name).numpy().tolist() == of_slots[slot_of_row].tolist(), name
    assert rows.position.tolist() == [7 - 4, 2 - 1, 8 - 5, 5 - 2, 1, 1, 3 - 3]
    parameters.version += 1
    made.send()
    assert len(sent) == 2


def test_what_cannot_be_captured_is_left_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Told once, by the name of what to leave, and not tried again."""
    asked = []

    def refuse(fn: Callable[[], None], trial: Trial | None) -> Callable[[], None]:
        asked.append(trial)
        raise ContractError("capture a decode step", "it copies from the host", "leave that", point="platform")

    tables = StepTables(torch.zeros(3, 9, dtype=torch.int32), (), ())
    platform = type("Platform", (), {"device": torch.device("cpu")})()
    trial = Trial(lambda number: None, lambda: ())
    for insists in (True, False):
        parameters: Any = SlotParameters(2, 9)
        made = CudaWholeSteps(platform, refuse, Done, insists, None, tables, parameters)  # type: ignore[arg-type]
        none: Any = None
        if insists:
            with pytest.raises(ContractError, match="it copies from the host; start with --platform.capture_whole"):
                made.capture(none, none, lambda: None, trial)
        else:
            assert [made.capture(none, none, lambda: None, trial) for _ in range(2)] == [None] * 2
    assert len(asked) == 2 and caplog.text.count("it copies from the host") == 1


def test_tokens_stay_as_they_were_told() -> None:
    """They are read whenever the host comes to it, in any order; where nobody has come in time they were put aside."""
    tables = StepTables(torch.zeros(4, 9, dtype=torch.int32), (), ())
    platform = type("Platform", (), {"device": torch.device("cpu"), "to_device": lambda self, host, out: None})()
    waited, drawn, broken = [], torch.zeros(4, dtype=torch.int32), list[str]()

    class Event(Done):
        def __init__(self) -> None:
            if broken:
                raise RuntimeError(broken.pop())

        def synchronize(self) -> None:
            waited.append(self)

    parameters: Any = SlotParameters(3, 9)
    made = CudaWholeSteps(platform, lambda fn, trial: replay, Event, True, None, tables, parameters)  # type: ignore[arg-type]

    def replay() -> None:
        made._turn_there += 1
        made.tell(drawn)

    none: Any = None
    launch = made.capture(none, none, lambda: None, Trial(lambda number: None, lambda: ()))
    assert launch is not None
    told = []
    for step in range(2 * TURNS):
        drawn[:] = torch.arange(4) + 10 * step
        told.append(launch(1 + step % 3))
        assert len(waited) == max(0, step + 1 - TURNS), "the host waits for a step that is long done, and no other"
    for step in reversed(range(2 * TURNS)):
        (tokens,) = told[step].wait()
        assert told[step].done() and tokens.tolist() == [10 * step, 10 * step + 1, 10 * step + 2][: 1 + step % 3]
    assert len(waited) == 2 * TURNS
    broken += ["no event"]
    for now in ([7, 7, 7], [8, 9, 10]):  # the device has counted the first of them, too
        drawn[:3] = torch.tensor(now)
        with pytest.raises(RuntimeError, match="no event") if broken else nullcontext():
            assert launch(3).wait()[0].tolist() == now


def test_they_are_what_the_suite_asks_for() -> None:
    body = WholePlatformBody(WorkerContext(start=harness.start_message(platform="whole"), options=None))
    assert check_whole_steps(body) and body.launched == STEPS


def test_a_platform_from_before_new_pages_came_to_them_makes_none() -> None:
    assert without_whole_steps(harness.BucketPlatformBody) is harness.BucketPlatformBody
    body = without_whole_steps(WholePlatformBody)
    assert body.whole_steps is None and issubclass(body, WholePlatformBody)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_their_kernels_compile() -> None:
    """For each GPU, of one table of pages and of two."""
    begin = {"news": "*i32", "turn": "*i32", "slot_of_row": "*i32", "seq_lens": "*i32", "words": "*i32"}
    begin |= {"seeds": "*i64", "words_out": "*i32", "longs_out": "*i64", "stride": "i32", "width": "i32"}
    tell = {"drawn": "*i32", "turn": "*i32", "told": "*i32", "count": "i32", "width": "i32"}
    for use in compiled.compile_all(
        [
            case
            for target in compiled.TARGETS
            for case in (
                *(
                    compiled.Case(
                        begin_kernel,
                        {**begin, "count": "i32", "tables": ("*i32",) * tables, "table_strides": ("i32",) * tables},
                        {"TABLES": tables, "ROWS": ROWS},
                        target,
                    )
                    for tables in (1, 2)
                ),
                compiled.Case(tell_kernel, tell, {"TURNS": TURNS, "ROWS": ROWS}, target),
            )
        ]
    ):
        assert use.spilled == 0
