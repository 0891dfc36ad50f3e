"""Hand-written plans through a real worker, against a dense forward pass of the same model."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from harness import VOCAB, Driver, Request, dense_logits, params, prompt, registry, start_message, started
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.platform import CaptureKey
from engine.process import wire
from engine.runner.worker import TorchWorker
from engine.types.params import SamplingParams
from engine.types.plan import NewBlocks, StepPlan
from engine_reference.models.llama_card import Qwen2

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def worker() -> Iterator[TorchWorker]:
    worker = started()
    yield worker
    worker.shutdown()


def alone(worker: TorchWorker, tokens: list[int], chosen: SamplingParams, outputs: int) -> list[int]:
    return Driver(worker).alone(Request(tokens, chosen, slot=3), outputs)


def test_greedy_equals_a_dense_forward(worker: TorchWorker) -> None:
    request = Request(prompt(23), params(logprobs=3), slot=0)
    Driver(worker).alone(request, 30)
    logits = dense_logits(request.tokens)
    expected = logits[22:-1].argmax(dim=1).tolist()
    assert request.outputs == expected
    assert len(set(expected)) > 5
    every = torch.log_softmax(logits[22:-1], dim=1)
    for row, (chosen, rank, top_ids, top_values) in zip(every, request.logprobs, strict=True):
        assert rank == 1
        np.testing.assert_allclose(chosen, row.max(), rtol=1e-6)
        top = row.topk(3)
        assert top_ids == top.indices.tolist()
        np.testing.assert_allclose(top_values, top.values, rtol=1e-6)


@given(st.lists(st.integers(1, 13), min_size=1, max_size=8), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_awkward_chunks_equal_one_prefill(worker: TorchWorker, chunks: list[int], seed: int) -> None:
    tokens = prompt(sum(chunks), seed)
    request, driver = Request(tokens, params(**SAMPLED), slot=1), Driver(worker, seed)
    for chunk in chunks:
        driver.step((request, chunk))
    while len(request.outputs) < 6:
        driver.step((request, 1))
    assert request.outputs == alone(worker, tokens, params(**SAMPLED), 6)


def test_batched_equals_alone(worker: TorchWorker) -> None:
    """Greedy and sampled rows, with and without penalties and log probabilities, arriving one after the other."""
    kinds = [{}, SAMPLED, {"temperature": 1.5, "logprobs": 0}, {"temperature": 0.7, "min_p": 0.1}, {"top_k": 3}]
    requests = [
        Request(prompt(5 + 7 * i, seed=i), params(**{**kind, "seed": i}), slot=7 - i) for i, kind in enumerate(kinds)
    ]
    driver = Driver(worker)
    for i, arriving in enumerate(requests):
        driver.step(*((request, 1) for request in requests[:i]), (arriving, len(arriving.prompt)))
    for _ in range(8):
        driver.step(*((request, 1) for request in requests))
    for i, request in enumerate(requests):
        assert request.outputs == alone(worker, request.prompt, request.params, len(request.outputs)), f"request {i}"
    assert len(requests[2].logprobs) == len(requests[2].outputs)


@pytest.mark.parametrize("kind", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_two_steps_in_flight(worker: TorchWorker, kind: dict) -> None:
    """The second plan is sent before the first result is read: its token is only on the device."""
    first, second = Request(prompt(9), params(**kind), slot=2), Request(prompt(30, 1), params(**kind), slot=5)
    driver = Driver(worker)
    driver.submit((first, 9))
    driver.submit((first, 1), (second, 17))
    driver.submit((first, 1), (second, 13))
    for _ in range(10):
        driver.submit((first, 1), (second, 1))
        driver.take()
    assert len(first.outputs) < first.placed - len(first.prompt)
    while driver.under_way:
        driver.take()
    for request in (first, second):
        assert request.outputs == alone(worker, request.prompt, request.params, len(request.outputs))


def test_preempted_and_resumed(worker: TorchWorker) -> None:
    """Another slot, other pages, and a prompt that now holds its outputs: positions of random numbers go on."""
    chosen = params(**SAMPLED, frequency_penalty=0.4)
    request, other = Request(prompt(11), chosen, slot=0), Request(prompt(8, 2), params(), slot=1)
    driver = Driver(worker)
    driver.step((request, 11), (other, 8))
    for _ in range(5):
        driver.step((request, 1), (other, 1))
    driver.preempt(request, slot=6)
    driver.step((other, 1), (request, 9))
    driver.step((other, 1), (request, 8))
    for _ in range(5):
        driver.step((request, 1), (other, 1))
    assert request.outputs == alone(worker, request.prompt, chosen, len(request.outputs))


def test_slot_is_reused(worker: TorchWorker) -> None:
    """Nothing of a slot's last request is left: tokens, blocks, penalties, stop ids, log probabilities."""
    driver = Driver(worker)
    first = Request(prompt(40), params(**SAMPLED, logprobs=2, min_tokens=5), slot=4, stop_ids=[1, 2, 3])
    driver.alone(first, 6)
    second = Request(prompt(6, 3), params(), slot=4)
    assert driver.alone(second, 6) == alone(worker, second.prompt, params(), 6)
    assert second.logprobs == []


def test_padded_rows_change_nothing() -> None:
    """A platform with buckets: decode steps run padded and captured, and give what unpadded ones give."""
    plain, padded = started(), started(platform="buckets", attention="capturable")
    results = []
    for worker in (plain, padded):
        driver = Driver(worker)
        requests = [Request(prompt(6 + i, i), params(**SAMPLED if i % 2 else {}), slot=i) for i in range(6)]
        driver.step(*((request, len(request.prompt)) for request in requests))
        for count in (6, 5, 4, 3, 2, 1, 1, 6, 4):
            driver.step(*((request, 1) for request in requests[:count]))
        driver.submit(*((request, 1) for request in requests[:3]))
        driver.submit(*((request, 1) for request in requests[:3]))
        driver.take(), driver.take()
        results.append([request.outputs for request in requests])
    assert results[0] == results[1]
    runner = padded._runner
    assert runner is not None and plain._runner is not None
    assert runner._platform.captures == {  # type: ignore[attr-defined]
        None: 1,
        CaptureKey(4): 8,
        CaptureKey(12): 3,
        **{CaptureKey(tokens, 0): 0 for tokens in (12, 40)},
    }
    assert plain._runner._captured == {}
    assert not runner._slots.tables.tokens[runner._slots.scratch_slot].any(), "nothing is drawn for padding"
    assert not runner._slots.tables.blocks[0][runner._slots.scratch_slot].any()


def test_a_model_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its card says so: the platform gets no step of it to capture, the start says why, and it computes the same."""
    monkeypatch.setattr(Qwen2, "captured_by", frozenset())
    worker = TorchWorker(start_message(platform="buckets", attention="capturable"), registry())
    ready = worker.start()
    assert ready.captured == () and ready.not_captured is not None
    assert any(
        "model 'Qwen2ForCausalLM'" in said and "captured_by = frozenset()" in said for said in ready.not_captured
    )
    runner = worker._runner
    assert runner is not None and not any(runner._platform.captures.values())  # type: ignore[attr-defined]
    request = Request(prompt(6), params(), slot=0)
    assert Driver(worker).alone(request, 5) == Driver(started()).alone(Request(prompt(6), params(), slot=0), 5)
    assert runner._platform.captures.keys() <= {None}  # type: ignore[attr-defined]


def test_min_tokens_and_stop_ids(worker: TorchWorker) -> None:
    """The most likely ids are stop ids: before min_tokens others come, then they do."""
    free = alone(worker, prompt(12), params(), 1)[0]
    request = Request(prompt(12), params(min_tokens=3, logprobs=1), slot=0, stop_ids=[free, VOCAB, 10**6])
    Driver(worker).alone(request, 6)
    assert free not in request.outputs[:3]
    assert request.logprobs[0][2] == [free] and request.logprobs[0][1] > 1, "log probabilities are from before the mask"


def test_penalties_see_tokens_on_the_device(worker: TorchWorker) -> None:
    """Every logit that came once is pushed far away, also that of the step whose result nobody has read."""
    chosen = params(presence_penalty=2.0, repetition_penalty=1e4)
    request, driver = Request(prompt(5), chosen, slot=0), Driver(worker)
    driver.submit((request, 5))
    for _ in range(15):
        driver.submit((request, 1))
    while driver.under_way:
        driver.take()
    assert len(set(request.outputs)) == 16 and not set(request.outputs) & set(request.prompt)


def test_logprob_rows(worker: TorchWorker) -> None:
    """Only rows that draw and asked are reported, and as many alternatives as the most that was asked for."""
    asked = [None, 2, 0, 5]
    requests = [Request(prompt(10, i), params(logprobs=n, temperature=1.0), slot=i) for i, n in enumerate(asked)]
    driver = Driver(worker)
    work = [(request, 10 if i != 3 else 4) for i, request in enumerate(requests)]
    result = driver.step(*work)
    assert result.logprobs is not None
    assert result.logprobs.row.tolist() == [1, 2] and result.logprobs.top_ids.shape == (2, 2)
    for i in (1, 2):
        row = torch.log_softmax(dense_logits(requests[i].prompt)[-1], dim=0)
        np.testing.assert_allclose(requests[i].logprobs[0][0], row[requests[i].outputs[0]], rtol=1e-6)
    assert driver.step((requests[0], 1)).logprobs is None


def test_a_plan_from_the_wire(worker: TorchWorker) -> None:
    """Arrays that came off the wire are read-only; and a plan and its result are what they were."""
    request, driver = Request(prompt(10), params(**SAMPLED, logprobs=2), slot=0), Driver(worker)
    sent: list[StepPlan] = []
    execute = worker.execute

    class Remote:
        def execute(self, plan: StepPlan) -> object:
            sent.append(wire.decoder(StepPlan).decode(wire.encode(plan)))
            return execute(sent[-1])

    driver.worker = Remote()  # type: ignore[assignment]
    driver.step((request, 10))
    result = driver.step((request, 1))
    assert not sent[0].num_tokens.flags.writeable
    again = wire.decoder(type(result)).decode(wire.encode(result))
    assert np.array_equal(again.tokens, result.tokens) and again.tokens.dtype == np.int32
    assert again.logprobs.row.dtype == again.logprobs.top_ids.dtype == again.logprobs.rank.dtype == np.int32
    assert again.logprobs.chosen.dtype == again.logprobs.top_values.dtype == np.float32


def test_a_plan_without_rows(worker: TorchWorker) -> None:
    none = np.zeros(0, np.int32)
    blocks = [NewBlocks(slot=none, index=none, page=none) for _ in range(2)]
    plan = StepPlan(
        step_id=9, slot_of_row=none, num_computed=none, num_tokens=none, samples=none.astype(bool), num_decodes=0,
        new_slots=[], new_blocks=blocks,
    )  # fmt: skip
    result = worker.execute(plan).result()
    assert (result.step_id, len(result.tokens), result.logprobs) == (9, 0, None)
